{{/* The settings file: what the user gave, and what the chart sets. A function of its own, so that the pod can carry its checksum. */}}
{{- define "tandem.config" -}}
{{- $own := dict "host" "0.0.0.0" "port" 8080 "shm_dir" "/dev/shm" "state_dir" "/data/state" "models_dir" "/data/models" "log_format" "json" -}}
{{- if eq .Values.cards "host" -}}
{{- $_ := set $own "cards" "host:0,host:1" -}}
{{- $_ := set $own "peer_check" "off" -}}
{{- else -}}
{{- $_ := set $own "cards" (ternary "cuda:0,cuda:1" "cuda:0" (eq (int .Values.gpu.count) 2)) -}}
{{- $_ := set $own "peer_check" .Values.gpu.peerCheck -}}
{{- end -}}
{{- if eq .Values.model.source "hub" -}}
{{- $_ := set $own "model" .Values.model.hub.reference -}}
{{- else if ne .Values.model.source "demo" -}}
{{- $_ := set $own "model" (printf "/models/%s" .Values.model.path | trimSuffix "/") -}}
{{- end -}}
{{- if include "tandem.keysSecret" . -}}
{{- $_ := set $own "api_key_file" (printf "/etc/tandem/keys/%s" .Values.apiKeys.key) -}}
{{- end -}}
{{- if include "tandem.hubSecret" . -}}
{{- $_ := set $own "hub_token_file" (printf "/etc/tandem/hub/%s" .Values.model.hub.tokenKey) -}}
{{- end -}}
{{- with include "tandem.prefix" . -}}
{{- $_ := set $own "url_prefix" . -}}
{{- end -}}
{{- with int64 (include "tandem.parkedMiB" .) -}}
{{- $_ := set $own "parked_mib" . -}}
{{- end -}}
{{- $_ := set $own "allowed_hosts" (include "tandem.hostNames" . | fromYamlArray) -}}
{{- merge $own .Values.settings | toYaml -}}
{{- end }}

{{/* Names under which the Service, the routes and the user know this server. */}}
{{- define "tandem.hostNames" -}}
{{- $service := include "tandem.fullname" . -}}
{{- $names := list $service (printf "%s.%s" $service .Release.Namespace) (printf "%s.%s.svc" $service .Release.Namespace) (printf "%s.%s.svc.cluster.local" $service .Release.Namespace) -}}
{{- if .Values.ingress.enabled -}}
{{- $names = concat $names .Values.ingress.hosts -}}
{{- end -}}
{{- if .Values.httpRoute.enabled -}}
{{- $names = concat $names .Values.httpRoute.hostnames -}}
{{- end -}}
{{- if .Values.virtualService.enabled -}}
{{- $names = concat $names .Values.virtualService.hosts -}}
{{- end -}}
{{- $given := .Values.settings.allowed_hosts | default list -}}
{{- ternary (list "*") (concat $names $given | uniq) (has "*" $given) | toYaml -}}
{{- end }}
