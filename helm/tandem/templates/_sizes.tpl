{{/* Sizes in MiB and times in seconds, all from model.sizeGiB unless given. */}}

{{/* "64Gi" -> 65536. Rounds up. */}}
{{- define "tandem.mebibytes" -}}
{{- $text := toString . -}}
{{- $number := regexFind "^[0-9]+(\\.[0-9]+)?" $text -}}
{{- $unit := trimPrefix $number $text -}}
{{- $factors := dict "Ki" 0.0009765625 "Mi" 1.0 "Gi" 1024.0 "Ti" 1048576.0 "k" 0.00095367431640625 "M" 0.95367431640625 "G" 953.67431640625 "T" 953674.31640625 "" 0.00000095367431640625 -}}
{{- if or (not $number) (not (hasKey $factors $unit)) -}}
{{- fail (printf "%q is no size; write it like 64Gi" $text) -}}
{{- end -}}
{{- mulf (float64 $number) (get $factors $unit) | ceil | int64 -}}
{{- end }}

{{/* "1500m" -> 1.5 */}}
{{- define "tandem.cores" -}}
{{- $text := toString . -}}
{{- if hasSuffix "m" $text -}}
{{- divf (float64 (trimSuffix "m" $text)) 1000.0 -}}
{{- else -}}
{{- float64 ($text | default "0") -}}
{{- end -}}
{{- end }}

{{/* The arena holds the experts, which are less than the files; so the files' size with a fiftieth to spare always suffices. */}}
{{- define "tandem.arenaMiB" -}}
{{- mulf .Values.model.sizeGiB 1024.0 | ceil | int64 -}}
{{- end }}

{{- define "tandem.shmMiB" -}}
{{- if .Values.memory.shm -}}
{{- include "tandem.mebibytes" .Values.memory.shm -}}
{{- else -}}
{{- addf (mulf (int64 (include "tandem.arenaMiB" .)) 1.02) 64.0 (int64 (include "tandem.parkedMiB" .)) | ceil | int64 -}}
{{- end -}}
{{- end }}

{{/* Conversations that lanes had to leave lie in /dev/shm too. */}}
{{- define "tandem.parkedMiB" -}}
{{- $elastic := .Values.settings.elastic | default dict -}}
{{- if kindIs "invalid" .Values.settings.parked_mib -}}
{{- ternary 2048 0 (default false $elastic.enabled) -}}
{{- else -}}
{{- int64 .Values.settings.parked_mib -}}
{{- end -}}
{{- end }}

{{/* Beside /dev/shm: web server and engines; with GPUs the driver's share in each engine, with host cards what lies "on" them:
     dense weights, key/value cache, and slots for a quarter of the experts each. */}}
{{- define "tandem.processesMiB" -}}
{{- if eq .Values.cards "host" -}}
{{- addf 1536.0 (mulf (int64 (include "tandem.arenaMiB" .)) 0.8) | ceil | int64 -}}
{{- else -}}
{{- add 1024 (mul 2048 (max 1 .Values.gpu.count)) -}}
{{- end -}}
{{- end }}

{{- define "tandem.memoryMiB" -}}
{{- if .Values.memory.limit -}}
{{- include "tandem.mebibytes" .Values.memory.limit -}}
{{- else -}}
{{- add (include "tandem.shmMiB" .) (include "tandem.processesMiB" .) -}}
{{- end -}}
{{- end }}

{{- define "tandem.startSeconds" -}}
{{- $mib := int64 (include "tandem.arenaMiB" .) -}}
{{- $load := divf $mib .Values.probes.loadMiBPerSecond -}}
{{- $download := 0.0 -}}
{{- if and (eq .Values.model.source "hub") (ne .Values.model.hub.download "init") -}}
{{- $download = divf $mib .Values.probes.downloadMiBPerSecond -}}
{{- end -}}
{{- addf 120.0 $load $download | ceil | int64 -}}
{{- end }}

{{- define "tandem.drainSeconds" -}}
{{- .Values.settings.drain_s | default 30 | float64 | ceil | int64 -}}
{{- end }}

{{/* 35: what the server allows its engines to end in, and a little. */}}
{{- define "tandem.leastGraceSeconds" -}}
{{- add .Values.drain.preStopSeconds (include "tandem.drainSeconds" .) 35 -}}
{{- end }}

{{- define "tandem.graceSeconds" -}}
{{- if .Values.drain.graceSeconds -}}
{{- .Values.drain.graceSeconds | int64 -}}
{{- else -}}
{{- include "tandem.leastGraceSeconds" . -}}
{{- end -}}
{{- end }}
