{{/* Names, labels, and the image. */}}

{{- define "tandem.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end }}

{{- define "tandem.fullname" -}}
{{- $name := include "tandem.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{- define "tandem.selector" -}}
app.kubernetes.io/name: {{ include "tandem.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "tandem.labels" -}}
{{ include "tandem.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "tandem.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{- define "tandem.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "tandem.fullname" .) }}
{{- else -}}
{{ .Values.serviceAccount.name | default "default" }}
{{- end -}}
{{- end }}

{{- define "tandem.keysSecret" -}}
{{- if .Values.apiKeys.existingSecret -}}
{{ .Values.apiKeys.existingSecret }}
{{- else if .Values.apiKeys.values -}}
{{ include "tandem.fullname" . }}-keys
{{- end -}}
{{- end }}

{{- define "tandem.hubSecret" -}}
{{- if .Values.model.hub.tokenSecret -}}
{{ .Values.model.hub.tokenSecret }}
{{- else if .Values.model.hub.token -}}
{{ include "tandem.fullname" . }}-hub
{{- end -}}
{{- end }}

{{- define "tandem.dataClaim" -}}
{{- if eq .Values.storage.kind "existing" -}}
{{ .Values.storage.existingClaim }}
{{- else if eq .Values.storage.kind "new" -}}
{{ include "tandem.fullname" . }}-data
{{- end -}}
{{- end }}

{{/* The path prefix that the page and the API are reached under. */}}
{{- define "tandem.prefix" -}}
{{- if .Values.virtualService.enabled -}}
{{ .Values.virtualService.prefix | trimSuffix "/" }}
{{- else -}}
{{ .Values.settings.url_prefix | default "" | trimSuffix "/" }}
{{- end -}}
{{- end }}
