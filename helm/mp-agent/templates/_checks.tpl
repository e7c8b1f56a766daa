{{- /*
Fails on values that each are well-formed and together would leave alerts or agents without effect.
The agents refuse such numbers as `mp-agent rules` does, and would judge by none of their own.
*/}}
{{- define "mp-agent.checks" -}}
{{- $catalog := .Files.Get "files/rules.yaml" | fromYaml }}
{{- range $lower, $upper := $catalog.below }}
{{- $low := include "mp-agent.mark" (list $catalog $.Values.rules $lower) }}
{{- $high := include "mp-agent.mark" (list $catalog $.Values.rules $upper) }}
{{- if ge (float64 $low) (float64 $high) }}
{{- fail (printf "rules.thresholds.%s is %s; it must be below %s, which is %s" $lower $low $upper $high) }}
{{- end }}
{{- end }}
{{- range $shorter, $longer := $catalog.shorter }}
{{- $short := include "mp-agent.mark" (list $catalog $.Values.rules (printf "%s#" $shorter)) }}
{{- $long := include "mp-agent.mark" (list $catalog $.Values.rules (printf "%s#" $longer)) }}
{{- if ge (float64 $short) (float64 $long) }}
{{- fail (printf "rules.durations.%s is %s s; it must be below %s, which is %s s, or one of the alerts is blind" $shorter $short $longer $long) }}
{{- end }}
{{- end }}
{{- range $name, $value := .Values.rules.thresholds }}
{{- if and (has $name $catalog.shares) (gt (float64 $value) 1.0) }}
{{- fail (printf "rules.thresholds.%s is %v; it is a share, at most 1" $name $value) }}
{{- end }}
{{- end }}
{{- range $owner, $interval := dict "podMonitor" .Values.podMonitor.interval "scrapeConfig" .Values.scrapeConfig.interval }}
{{- $timeout := include "mp-agent.scrapeTimeout" (list $ $interval) }}
{{- if gt (include "mp-agent.seconds" $timeout | float64) (include "mp-agent.seconds" $interval | float64) }}
{{- fail (printf "podMonitor.scrapeTimeout is %s; it must not exceed %s.interval, which is %s" $timeout $owner $interval) }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Time-out of a scrape: as set, else 10 s, or the interval if that is shorter. Arguments: root context, interval. */}}
{{- define "mp-agent.scrapeTimeout" -}}
{{- $root := index . 0 }}{{ $interval := index . 1 }}
{{- if $root.Values.podMonitor.scrapeTimeout }}
{{- $root.Values.podMonitor.scrapeTimeout }}
{{- else if lt (include "mp-agent.seconds" $interval | float64) 10.0 }}
{{- $interval }}
{{- else -}}
10s
{{- end }}
{{- end }}
