{{- /*
The data of the settings' ConfigMap. The agents judge by the same numbers, windows and severities as
the rules, so those are set once, under `rules`.
*/}}
{{- define "mp-agent.settingsData" -}}
{{- $data := dict }}
{{- range $name, $value := .Values.agentSettings.settings }}
{{- if has $name (list "thresholds" "alerts") }}
{{- fail (printf "agentSettings.settings.%s: set rules.thresholds, rules.durations and rules.severities instead, which the agents get too" $name) }}
{{- end }}
{{- /* toString would write two million as 2e+06. */}}
{{- $_ := set $data (printf "MP_AGENT_%s" (upper $name)) (kindIs "string" $value | ternary $value (toJson $value)) }}
{{- end }}
{{- with .Values.rules.thresholds }}
{{- $_ := set $data "MP_AGENT_THRESHOLDS" (toJson .) }}
{{- end }}
{{- $alerts := include "mp-agent.alerts" .Values.rules | fromYaml }}
{{- with $alerts }}
{{- $_ := set $data "MP_AGENT_ALERTS" (toJson .) }}
{{- end }}
{{- toYaml $data }}
{{- end }}
