{{/* What contradicts is refused with a sentence; `include "tandem.checks" .` stands in the deployment. */}}

{{- define "tandem.checks" -}}
{{- include "tandem.checkCards" . -}}
{{- include "tandem.checkModel" . -}}
{{- include "tandem.checkMemory" . -}}
{{- include "tandem.checkSettings" . -}}
{{- include "tandem.checkElastic" . -}}
{{- include "tandem.checkStorage" . -}}
{{- include "tandem.checkAccess" . -}}
{{- include "tandem.checkEnd" . -}}
{{- end }}

{{- define "tandem.checkCards" -}}
{{- $dra := .Values.gpu.dra.enabled -}}
{{- if and (eq .Values.cards "host") $dra -}}
{{- fail "cards is host, but gpu.dra.enabled claims GPUs; turn one of them off" -}}
{{- end -}}
{{- if and (eq .Values.cards "host") .Values.gpu.products -}}
{{- fail "cards is host, but gpu.products asks for nodes with GPUs; leave gpu.products empty or set cards to cuda" -}}
{{- end -}}
{{- if and (eq .Values.cards "host") (eq .Values.gpu.peerCheck "require") -}}
{{- fail "cards is host, but gpu.peerCheck is require: there are no GPUs to try; set gpu.peerCheck to off or cards to cuda" -}}
{{- end -}}
{{- if and (eq .Values.gpu.peerCheck "require") (ne (int .Values.gpu.count) 2) -}}
{{- fail (printf "gpu.peerCheck is require, but gpu.count is %d: there is no second card to reach; set gpu.count to 2 or gpu.peerCheck to off" (int .Values.gpu.count)) -}}
{{- end -}}
{{- $request := float64 (include "tandem.cores" .Values.cpu.request) -}}
{{- if and .Values.cpu.limit (lt (float64 (include "tandem.cores" .Values.cpu.limit)) $request) -}}
{{- fail (printf "cpu.limit is %s, but cpu.request is %s; raise the limit, lower the request, or leave the limit empty" .Values.cpu.limit .Values.cpu.request) -}}
{{- end -}}
{{- if and $dra (semverCompare "<1.34.0-0" .Capabilities.KubeVersion.Version) -}}
{{- fail (printf "gpu.dra.enabled needs Kubernetes 1.34, but this cluster has %s; use the device plugin instead" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- if and $dra .Values.gpu.products -}}
{{- fail "gpu.products chooses nodes for the device plugin; with gpu.dra.enabled write the product into gpu.dra.selectors" -}}
{{- end -}}
{{- end }}

{{- define "tandem.checkModel" -}}
{{- $source := .Values.model.source -}}
{{- range $name, $given := dict "hub" .Values.model.hub.reference "claim" .Values.model.claim "hostPath" .Values.model.hostPath "image" .Values.model.image.reference -}}
{{- if and (eq $source $name) (not $given) -}}
{{- fail (printf "model.source is %s, but model.%s is empty" $name (get (dict "hub" "hub.reference" "image" "image.reference" "claim" "claim" "hostPath" "hostPath") $name)) -}}
{{- end -}}
{{- if and (ne $source $name) $given -}}
{{- fail (printf "model.source is %s, but model.%s names another source; name one" $source $name) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.model.path (has $source (list "demo" "hub")) -}}
{{- fail (printf "model.path is a path in a volume, but model.source %s has none; leave model.path empty" $source) -}}
{{- end -}}
{{- if and (eq $source "image") (semverCompare "<1.33.0-0" .Capabilities.KubeVersion.Version) -}}
{{- fail (printf "model.source image needs Kubernetes 1.33, but this cluster has %s; use a claim" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- if and (eq $source "hub") (eq .Values.model.hub.download "job") (eq .Values.storage.kind "none") -}}
{{- fail "model.hub.download is job, but storage.kind is none: job and server would have no folder in common; set storage.kind to new or existing" -}}
{{- end -}}
{{- end }}

{{- define "tandem.checkMemory" -}}
{{- $arena := int64 (include "tandem.arenaMiB" .) -}}
{{- $shm := int64 (include "tandem.shmMiB" .) -}}
{{- $processes := int64 (include "tandem.processesMiB" .) -}}
{{- $limit := int64 (include "tandem.memoryMiB" .) -}}
{{- $parked := int64 (include "tandem.parkedMiB" .) -}}
{{- if lt $shm (int64 (add $arena $parked)) -}}
{{- fail (printf "memory.shm is %dMi, but a model of %dMi may need as much for its arena, and parked conversations %dMi; raise memory.shm or leave it empty" $shm $arena $parked) -}}
{{- end -}}
{{- if lt $limit (int64 (add $shm $processes)) -}}
{{- fail (printf "memory.limit is %dMi, but /dev/shm (%dMi) counts against it and the processes need %dMi beside it; raise memory.limit to %dMi or leave it empty" $limit $shm $processes (add $shm $processes)) -}}
{{- end -}}
{{- end }}

{{- define "tandem.checkSettings" -}}
{{- $owners := dict "model" "model" "cards" "cards and gpu.count" "host" "the chart" "port" "the chart" "shm_dir" "the chart" "state_dir" "storage" "models_dir" "storage" "api_key_file" "apiKeys" "hub_token_file" "model.hub.token" "peer_check" "gpu.peerCheck" "log_format" "the chart" -}}
{{- range $name, $owner := $owners -}}
{{- if hasKey $.Values.settings $name -}}
{{- fail (printf "settings.%s is set by %s; leave it out of settings" $name $owner) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.virtualService.enabled .Values.settings.url_prefix -}}
{{- fail "settings.url_prefix is set by virtualService.prefix; leave it out of settings" -}}
{{- end -}}
{{- end }}

{{/* What the server would refuse at its start: better no pod than one that begins again and again. */}}
{{- define "tandem.checkElastic" -}}
{{- $settings := .Values.settings -}}
{{- $elastic := $settings.elastic | default dict -}}
{{- if and $elastic (not (hasKey $elastic "enabled")) -}}
{{- fail "settings.elastic has no effect without settings.elastic.enabled; set that to true, or to false to keep the others for later" -}}
{{- end -}}
{{- if $elastic.enabled -}}
{{- if and (eq .Values.cards "cuda") (ne (int .Values.gpu.count) 2) -}}
{{- fail (printf "settings.elastic.enabled needs two cards, but gpu.count is %d; set gpu.count to 2 or leave elastic out" (int .Values.gpu.count)) -}}
{{- end -}}
{{- if not (or (dig "peer" true $elastic) (dig "link" true $elastic)) -}}
{{- fail "settings.elastic with neither peer nor link would only make the helper sleep; switch one of them on, or leave elastic out" -}}
{{- end -}}
{{- if and (not (dig "link" true $elastic)) (ne (int (dig "link_threads" 1 $elastic)) 1) -}}
{{- fail "settings.elastic.link_threads has no effect while settings.elastic.link is off; switch link on, or leave link_threads out" -}}
{{- end -}}
{{- if and (hasKey $settings "slots") (not (kindIs "invalid" $settings.slots)) (eq (int $settings.slots) 0) -}}
{{- fail "settings.elastic.enabled needs expert slots to share, but settings.slots is 0; raise slots or leave elastic out" -}}
{{- end -}}
{{- end -}}
{{- if and $settings.chunk $settings.context (gt (int $settings.chunk) (int $settings.context)) -}}
{{- fail (printf "settings.chunk (%d) is larger than settings.context (%d); lower chunk" (int $settings.chunk) (int $settings.context)) -}}
{{- end -}}
{{- if and $settings.max_tokens_limit $settings.default_max_tokens (gt (int $settings.default_max_tokens) (int $settings.max_tokens_limit)) -}}
{{- fail (printf "settings.default_max_tokens (%d) is larger than settings.max_tokens_limit (%d), which cuts it; lower it" (int $settings.default_max_tokens) (int $settings.max_tokens_limit)) -}}
{{- end -}}
{{- end }}

{{- define "tandem.checkStorage" -}}
{{- $storage := .Values.storage -}}
{{- if and (eq $storage.kind "existing") (not $storage.existingClaim) -}}
{{- fail "storage.kind is existing, but storage.existingClaim is empty" -}}
{{- end -}}
{{- if and (ne $storage.kind "existing") $storage.existingClaim -}}
{{- fail (printf "storage.existingClaim is given, but storage.kind is %s; set it to existing" $storage.kind) -}}
{{- end -}}
{{- if and (eq $storage.kind "new") (gt (int .Values.replicas) 1) (not (has "ReadWriteMany" $storage.accessModes)) -}}
{{- fail (printf "%d replicas cannot share a volume that one node may mount; give storage.accessModes ReadWriteMany or set storage.kind to none" (int .Values.replicas)) -}}
{{- end -}}
{{- if and (eq $storage.kind "new") (eq .Values.model.source "hub") (lt (int64 (include "tandem.mebibytes" $storage.size)) (int64 (include "tandem.arenaMiB" .))) -}}
{{- fail (printf "storage.size is %s, but the model alone has %v GiB" $storage.size .Values.model.sizeGiB) -}}
{{- end -}}
{{- end }}

{{- define "tandem.checkAccess" -}}
{{- if and .Values.apiKeys.values .Values.apiKeys.existingSecret -}}
{{- fail "apiKeys.values and apiKeys.existingSecret are both given; choose one" -}}
{{- end -}}
{{- if and .Values.model.hub.token .Values.model.hub.tokenSecret -}}
{{- fail "model.hub.token and model.hub.tokenSecret are both given; choose one" -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) -}}
{{- fail "ingress.enabled needs ingress.hosts: the server answers only to names that it knows" -}}
{{- end -}}
{{- range include "tandem.hostNames" . | fromYamlArray -}}
{{- if hasPrefix "*." . -}}
{{- fail (printf "%s is no name that the server could compare with Host; name each host, or put * into settings.allowed_hosts to answer to all" .) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (or (not .Values.httpRoute.parentRefs) (not .Values.httpRoute.hostnames)) -}}
{{- fail "httpRoute.enabled needs httpRoute.parentRefs and httpRoute.hostnames" -}}
{{- end -}}
{{- if and .Values.virtualService.enabled (or (not .Values.virtualService.gateways) (not .Values.virtualService.hosts)) -}}
{{- fail "virtualService.enabled needs virtualService.gateways and virtualService.hosts" -}}
{{- end -}}
{{- if and .Values.virtualService.enabled (not (hasPrefix "/" .Values.virtualService.prefix)) -}}
{{- fail (printf "virtualService.prefix is %q; it must begin with a slash, such as /tandem" .Values.virtualService.prefix) -}}
{{- end -}}
{{- end }}

{{- define "tandem.checkEnd" -}}
{{- $least := int64 (include "tandem.leastGraceSeconds" .) -}}
{{- if lt (int64 (include "tandem.graceSeconds" .)) $least -}}
{{- fail (printf "drain.graceSeconds is %d, but preStop (%d), settings.drain_s (%s) and the end of the engines (35) need %d; raise it or set it to 0" (int .Values.drain.graceSeconds) (int .Values.drain.preStopSeconds) (include "tandem.drainSeconds" .) $least) -}}
{{- end -}}
{{- end }}
