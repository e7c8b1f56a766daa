{{- define "mp-agent.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "mp-agent.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- $name := include "mp-agent.name" . }}
{{- if contains $name .Release.Name }}
{{- .Release.Name | replace "." "-" | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | replace "." "-" | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}
{{- end }}

{{- define "mp-agent.selectorLabels" -}}
app.kubernetes.io/name: {{ include "mp-agent.name" . }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "mp-agent.labels" -}}
{{ include "mp-agent.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: mp-agent
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* Labels of custom resources: those that an operator selects by come on top. */}}
{{- define "mp-agent.resourceLabels" -}}
{{- mustMergeOverwrite (include "mp-agent.labels" . | fromYaml) (.Values.additionalLabels | default dict) | toYaml }}
{{- end }}

{{- define "mp-agent.image" -}}
{{ printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) }}
{{- end }}

{{- define "mp-agent.settingsName" -}}
{{ default (printf "%s-settings" (include "mp-agent.fullname" .)) .Values.agentSettings.name }}
{{- end }}

{{- /* The agents' port, which pods, policies and notes have to agree upon. */}}
{{- define "mp-agent.port" -}}
{{ default 9464 .Values.agentSettings.settings.port | int }}
{{- end }}

{{- /* Not `mp-agent-…`: Kubernetes would put MP_AGENT_… variables of this Service into every pod. */}}
{{- define "mp-agent.collectorName" -}}
{{ printf "otlp-%s" (include "mp-agent.fullname" .) }}
{{- end }}

{{- define "mp-agent.collectorLabels" -}}
{{ include "mp-agent.selectorLabels" . }}
app.kubernetes.io/component: collector
{{- end }}

{{- /* Security context of a container that needs nothing: what the "restricted" standard asks for. */}}
{{- define "mp-agent.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- /*
Whether to create objects of a kind: "true", or nothing. Arguments: root context, API version, kind.
Only a cluster lists kinds next to API versions; without one, nothing is left out for want of CRDs.
*/}}
{{- define "mp-agent.has" -}}
{{- $root := index . 0 }}{{ $version := index . 1 }}
{{- $kind := printf "%s/%s" $version (index . 2) }}
{{- $assumed := $root.Values.assumeApiVersions }}
{{- $known := or $assumed ($root.Capabilities.APIVersions.Has "v1/Pod") }}
{{- $wanted := toString $root.Values.customResources }}
{{- if eq $wanted "true" }}true
{{- else if and (eq $wanted "auto") (or (not $known) ($root.Capabilities.APIVersions.Has $kind) (has $kind $assumed) (has $version $assumed)) }}true
{{- end }}
{{- end }}

{{- /* Where a NetworkPolicy finds Prometheus. */}}
{{- define "mp-agent.fromPrometheus" -}}
- namespaceSelector:
    matchLabels:
      kubernetes.io/metadata.name: {{ .Values.networkPolicy.prometheusNamespace | quote }}
  podSelector:
    matchLabels:
      {{- toYaml .Values.networkPolicy.prometheusPodLabels | nindent 6 }}
{{- end }}

{{- /* TLS and basic auth of a scrape. Argument: the value that holds `tlsConfig` and `basicAuth`. */}}
{{- define "mp-agent.scrapeAccess" -}}
{{- with .tlsConfig }}
tlsConfig:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .basicAuth }}
basicAuth:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
