{{/* What the server's container, the fetching init container and the job have in common. */}}

{{- define "tandem.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "tandem.podSecurity" -}}
runAsNonRoot: true
seccompProfile:
  type: RuntimeDefault
{{- with .Values.securityContext }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "tandem.mounts" -}}
- name: settings
  mountPath: /etc/tandem/settings
  readOnly: true
- name: data
  mountPath: /data
{{- if include "tandem.hubSecret" . }}
- name: hub-token
  mountPath: /etc/tandem/hub
  readOnly: true
{{- end }}
{{- end }}

{{- define "tandem.volumes" -}}
- name: settings
  configMap:
    name: {{ include "tandem.fullname" . }}
- name: data
{{- if include "tandem.dataClaim" . }}
  persistentVolumeClaim:
    claimName: {{ include "tandem.dataClaim" . }}
{{- else }}
  emptyDir: {}
{{- end }}
{{- if include "tandem.hubSecret" . }}
- name: hub-token
  secret:
    secretName: {{ include "tandem.hubSecret" . }}
    defaultMode: 0440
{{- end }}
{{- end }}

{{- define "tandem.modelVolume" -}}
{{- if eq .Values.model.source "claim" }}
- name: models
  persistentVolumeClaim:
    claimName: {{ .Values.model.claim }}
    readOnly: true
{{- else if eq .Values.model.source "hostPath" }}
- name: models
  hostPath:
    path: {{ .Values.model.hostPath }}
    type: Directory
{{- else if eq .Values.model.source "image" }}
- name: models
  image:
    reference: {{ .Values.model.image.reference }}
    pullPolicy: {{ .Values.model.image.pullPolicy }}
{{- end }}
{{- end }}

{{- define "tandem.fetchContainer" -}}
name: fetch
image: {{ include "tandem.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
args: [fetch]
env:
  - name: TANDEM_CONFIG
    value: /etc/tandem/settings/settings.yaml
resources:
  requests:
    cpu: "1"
    memory: 512Mi
  limits:
    memory: 1Gi
securityContext:
  {{- include "tandem.containerSecurity" . | nindent 2 }}
volumeMounts:
  {{- include "tandem.mounts" . | nindent 2 }}
  - name: scratch
    mountPath: /dev/shm
{{- end }}
