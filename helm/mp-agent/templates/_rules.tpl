{{- /*
The alert rules with this release's numbers. files/rules.yaml holds the rules with marks such as
@grad_norm_high@ in place of thresholds and durations, and the defaults of both.
*/}}
{{- define "mp-agent.rules" -}}
{{- $catalog := .Files.Get "files/rules.yaml" | fromYaml }}
{{- $rules := .Values.rules }}
{{- $text := $catalog.rules }}
{{- if not $rules.selectors.series }}
{{- $text = $text | replace "{@series_selector@}" "" | replace ",@series_selector@}" "}" }}
{{- end }}
{{- $text = replace "/d/mp-agent-" (printf "/d/%s-" .Values.dashboards.uidPrefix) $text }}
{{- $agentRunbook := $catalog.agentRunbook }}
{{- range $mark := $catalog.marks }}
{{- $agentRunbook = replace (printf "@%s@" $mark) (include "mp-agent.mark" (list $catalog $rules $mark)) $agentRunbook }}
{{- $text = replace (printf "@%s@" $mark) (include "mp-agent.mark" (list $catalog $rules $mark)) $text }}
{{- end }}
{{- $taken := dict }}
{{- $groups := list }}
{{- range $group := (fromYaml $text).groups }}
{{- $kept := list }}
{{- range $rule := $group.rules }}
{{- $severity := "" }}
{{- if $rule.alert }}
{{- $own := $rule.labels.severity }}
{{- $severity = $own }}
{{- $changes := default dict (get $rules.severities $rule.alert) }}
{{- if hasKey $changes $own }}
{{- $severity = include "mp-agent.severity" (get $changes $own) }}
{{- $_ := set $rule.labels "severity" $severity }}
{{- end }}
{{- if not $rules.runbookBase }}
{{- $_ := set $rule.annotations "runbook_url" (replace "{alert}" (lower $rule.alert) $agentRunbook) }}
{{- end }}
{{- if not $rules.dashboardBase }}
{{- $_ := unset $rule.annotations "dashboard_url" }}
{{- end }}
{{- if contains "{alert}" $rules.runbookBase }}
{{- $_ := set $rule.annotations "runbook_url" (replace "{alert}" (lower $rule.alert) $rules.runbookBase) }}
{{- end }}
{{- $key := printf "%s/%s" $rule.alert $severity }}
{{- if and (ne $severity "off") (ne (get $taken $key | default $own) $own) }}
{{- fail (printf "rules.severities.%s: its levels %s and %s would both be %s; turn one of them off" $rule.alert (get $taken $key) $own $severity) }}
{{- end }}
{{- $_ := set $taken $key $own }}
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

{{- /* A severity as the values have it, of which YAML reads a bare `off` as false. */}}
{{- define "mp-agent.severity" -}}
{{ toString . | replace "false" "off" }}
{{- end }}

{{- /* What stands for a mark: a base address, a selector, a threshold, or durations added up. */}}
{{- define "mp-agent.mark" -}}
{{- $catalog := index . 0 }}{{ $rules := index . 1 }}{{ $mark := index . 2 }}
{{- if eq $mark "runbook_base" }}
{{- default $catalog.runbookBase $rules.runbookBase | trimSuffix "/" }}
{{- else if eq $mark "dashboard_base" }}
{{- $rules.dashboardBase | trimSuffix "/" }}
{{- else if eq $mark "series_selector" }}
{{- $rules.selectors.series }}
{{- else if eq $mark "targets_selector" }}
{{- default $catalog.targetsSelector $rules.selectors.targets }}
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
{{- /* A large number would otherwise be written as 2e+06. */}}
{{- if and (hasSuffix "#" $mark) (eq (floor $seconds) (float64 $seconds)) }}{{ printf "%.0f" (float64 $seconds) }}
{{- else if hasSuffix "#" $mark }}{{ $seconds }}{{ else }}{{ include "mp-agent.duration" $seconds }}{{ end }}
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

{{- /* Durations and severities as the agents' setting `alerts` has them. */}}
{{- define "mp-agent.alerts" -}}
{{- $alerts := dict }}
{{- range $name, $value := .durations }}
{{- $_ := set $alerts $name (kindIs "string" $value | ternary $value (toJson $value)) }}
{{- end }}
{{- range $alert, $levels := .severities }}
{{- range $level, $severity := $levels }}
{{- $_ := set $alerts (printf "%s.%s" $alert $level) (include "mp-agent.severity" $severity) }}
{{- end }}
{{- end }}
{{- toYaml $alerts }}
{{- end }}
