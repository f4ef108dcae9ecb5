{{/* Which nodes, and how much of them. */}}

{{- define "tandem.affinity" -}}
{{- $affinity := deepCopy .Values.affinity -}}
{{- if .Values.gpu.products -}}
{{- $expression := dict "key" .Values.gpu.productLabel "operator" "In" "values" .Values.gpu.products -}}
{{- $node := get $affinity "nodeAffinity" | default dict -}}
{{- $required := get $node "requiredDuringSchedulingIgnoredDuringExecution" | default dict -}}
{{- $terms := list -}}
{{- range (get $required "nodeSelectorTerms" | default (list dict)) -}}
{{- $terms = append $terms (merge (dict "matchExpressions" (append (get . "matchExpressions" | default list) $expression)) .) -}}
{{- end -}}
{{- $_ := set $affinity "nodeAffinity" (merge (dict "requiredDuringSchedulingIgnoredDuringExecution" (dict "nodeSelectorTerms" $terms)) $node) -}}
{{- end -}}
{{- if $affinity -}}
{{- toYaml $affinity -}}
{{- end -}}
{{- end }}

{{/* Memory is asked for as it is limited: a pod that is short of memory later dies with an hour's work. */}}
{{- define "tandem.resources" -}}
{{- $memory := printf "%sMi" (include "tandem.memoryMiB" .) -}}
{{- $requests := dict "cpu" (toString .Values.cpu.request) "memory" $memory -}}
{{- $limits := dict "memory" $memory -}}
{{- with .Values.cpu.limit -}}
{{- $_ := set $limits "cpu" (toString .) -}}
{{- end -}}
{{- $resources := dict "requests" $requests "limits" $limits -}}
{{- if .Values.gpu.dra.enabled -}}
{{- $_ := set $resources "claims" (list (dict "name" "cards")) -}}
{{- else if eq .Values.cards "cuda" -}}
{{- $_ := set $limits .Values.gpu.resource (toString .Values.gpu.count) -}}
{{- $_ := set $requests .Values.gpu.resource (toString .Values.gpu.count) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end }}
