{{- /*
A dashboard with this release's thresholds and runbooks. Its file has marks such as
"@grad_norm_high@" in their place; files/rules.yaml has the defaults. Arguments: root context, path.
*/}}
{{- define "mp-agent.dashboard" -}}
{{- $root := index . 0 }}{{ $text := $root.Files.Get (index . 1) }}
{{- $rules := $root.Values.rules }}
{{- $catalog := $root.Files.Get "files/rules.yaml" | fromYaml }}
{{- range $name, $_ := $catalog.thresholds }}
{{- $value := include "mp-agent.mark" (list $catalog $rules $name) }}
{{- $text = $text | replace (printf "\"@%s@\"" $name) $value | replace (printf "@%s@" $name) $value }}
{{- end }}
{{- $base := include "mp-agent.mark" (list $catalog $rules "runbook_base") }}
{{- $page := contains "{alert}" $base | ternary (replace "{alert}" "${1}" $base) (printf "%s/${1}.md" $base) }}
{{- $text = regexReplaceAll "@runbook_base@/([a-z0-9]+)\\.md" $text $page }}
{{- regexReplaceAll "mp-agent-(fleet|run|layers|ranks|compare|more|self)" $text (printf "%s-${1}" $root.Values.dashboards.uidPrefix) }}
{{- end }}
