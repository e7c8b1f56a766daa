{{- define "mp-agent.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "mp-agent.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- $name := include "mp-agent.name" . }}
{{- if contains $name .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}
{{- end }}

{{- define "mp-agent.selectorLabels" -}}
app.kubernetes.io/name: {{ include "mp-agent.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
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
{{- mustMergeOverwrite (include "mp-agent.labels" . | fromYaml) .Values.additionalLabels | toYaml }}
{{- end }}

{{- define "mp-agent.image" -}}
{{ printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) }}
{{- end }}

{{- define "mp-agent.settingsName" -}}
{{ default (printf "%s-settings" (include "mp-agent.fullname" .)) .Values.agentSettings.name }}
{{- end }}

{{- /* Whether the cluster has an API version: "true", or nothing. Arguments: root context, version. */}}
{{- define "mp-agent.has" -}}
{{- $root := index . 0 }}{{ $version := index . 1 }}
{{- if or ($root.Capabilities.APIVersions.Has $version) (has $version $root.Values.assumeApiVersions) }}true{{ end }}
{{- end }}
