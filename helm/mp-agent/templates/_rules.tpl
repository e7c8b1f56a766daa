{{- /*
The alert rules with this release's numbers. files/rules.yaml holds the rules with marks such as
@grad_norm_high@ in place of thresholds and durations, and the defaults of both.
*/}}
{{- define "mp-agent.rules" -}}
{{- $catalog := .Files.Get "files/rules.yaml" | fromYaml }}
{{- $rules := .Values.rules }}
{{- $text := $catalog.rules }}
{{- range $mark := $catalog.marks }}
{{- $text = replace (printf "@%s@" $mark) (include "mp-agent.mark" (list $catalog $rules $mark)) $text }}
{{- end }}
{{- $groups := list }}
{{- range $group := (fromYaml $text).groups }}
{{- $kept := list }}
{{- range $rule := $group.rules }}
{{- $severity := "" }}
{{- if $rule.alert }}
{{- $severity = $rule.labels.severity }}
{{- $changes := default dict (get $rules.severities $rule.alert) }}
{{- if hasKey $changes $severity }}
{{- $severity = get $changes $severity | toString | replace "false" "off" }}
{{- $_ := set $rule.labels "severity" $severity }}
{{- end }}
{{- end }}
{{- if ne $severity "off" }}
{{- $kept = append $kept $rule }}
{{- end }}
{{- end }}
{{- if $kept }}
{{- $groups = append $groups (merge (dict "rules" $kept) $group) }}
{{- end }}
{{- end }}
{{- dict "groups" $groups | toYaml }}
{{- end }}

{{- /* What stands for a mark: a base address, a threshold, or durations added up. */}}
{{- define "mp-agent.mark" -}}
{{- $catalog := index . 0 }}{{ $rules := index . 1 }}{{ $mark := index . 2 }}
{{- if eq $mark "runbook_base" }}
{{- default $catalog.runbookBase $rules.runbookBase | trimSuffix "/" }}
{{- else if eq $mark "dashboard_base" }}
{{- default $catalog.dashboardBase $rules.dashboardBase | trimSuffix "/" }}
{{- else if hasKey $catalog.thresholds $mark }}
{{- if hasKey $rules.thresholds $mark }}{{ get $rules.thresholds $mark | toString }}{{ else }}{{ get $catalog.thresholds $mark }}{{ end }}
{{- else }}
{{- $seconds := 0.0 }}
{{- range $name := splitList "+" (trimSuffix "#" $mark) }}
{{- if hasKey $rules.durations $name }}
{{- $seconds = addf $seconds (include "mp-agent.seconds" (get $rules.durations $name | toString) | float64) }}
{{- else }}
{{- $seconds = addf $seconds (get $catalog.durations $name | float64) }}
{{- end }}
{{- end }}
{{- if hasSuffix "#" $mark }}{{ $seconds }}{{ else }}{{ include "mp-agent.duration" $seconds }}{{ end }}
{{- end }}
{{- end }}

{{- /* Seconds as Prometheus writes them: 1h30m, 10s, 250ms. */}}
{{- define "mp-agent.duration" -}}
{{- $rest := int64 (round (mulf . 1000) 0) }}
{{- range $unit, $milliseconds := dict "1h" 3600000 "2m" 60000 "3s" 1000 "4ms" 1 }}
{{- if ge $rest (int64 $milliseconds) }}{{ div $rest $milliseconds }}{{ substr 1 -1 $unit }}{{ end }}
{{- $rest = mod $rest $milliseconds }}
{{- end }}
{{- end }}

{{- /* Seconds in a text such as 90, 1m30s or 250ms. */}}
{{- define "mp-agent.seconds" -}}
{{- if regexMatch "^[0-9.e+-]+$" . }}{{ . }}
{{- else }}
{{- $seconds := 0.0 }}
{{- range $part := regexFindAll "[0-9]+(ms|s|m|h)" . -1 }}
{{- $number := regexFind "[0-9]+" $part | float64 }}
{{- $unit := regexFind "[a-z]+" $part }}
{{- $factor := get (dict "ms" 0.001 "s" 1.0 "m" 60.0 "h" 3600.0) $unit }}
{{- $seconds = addf $seconds (mulf $number $factor) }}
{{- end }}
{{- $seconds }}
{{- end }}
{{- end }}
