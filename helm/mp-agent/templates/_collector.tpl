{{- /* Pod and namespace become labels of every series, as a scrape has them. */}}
{{- define "mp-agent.collectorConfig" -}}
{{- $collector := .Values.collector -}}
extensions:
  health_check:
    endpoint: 0.0.0.0:13133
receivers:
  otlp:
    protocols:
      grpc:
        endpoint: 0.0.0.0:4317
      http:
        endpoint: 0.0.0.0:4318
processors:
  memory_limiter:
    check_interval: 1s
    limit_percentage: 80
    spike_limit_percentage: 20
  k8sattributes:
    extract:
      metadata: [k8s.namespace.name, k8s.pod.name, k8s.node.name]
    pod_association:
      - sources:
          - from: resource_attribute
            name: k8s.pod.uid
      - sources:
          - from: connection
  transform/identity:
    metric_statements:
      - context: datapoint
        statements:
          - set(datapoint.attributes["namespace"], resource.attributes["k8s.namespace.name"])
          - set(datapoint.attributes["pod"], resource.attributes["k8s.pod.name"])
          - set(datapoint.attributes["node"], resource.attributes["k8s.node.name"])
  batch: {}
exporters:
{{- if $collector.remoteWriteUrl }}
  prometheusremotewrite:
    endpoint: {{ $collector.remoteWriteUrl | quote }}
    {{- with $collector.remoteWriteHeaders }}
    headers:
      {{- range $name, $variable := . }}
      {{ $name }}: {{ printf "${env:%s}" $variable | quote }}
      {{- end }}
    {{- end }}
{{- else }}
  prometheus:
    endpoint: 0.0.0.0:8889
    without_scope_info: true
{{- end }}
  # Critical conditions: one line each in this container's log.
  debug: {verbosity: normal}
service:
  extensions: [health_check]
  pipelines:
    metrics:
      receivers: [otlp]
      processors: [memory_limiter, k8sattributes, transform/identity, batch]
      exporters: [{{ if $collector.remoteWriteUrl }}prometheusremotewrite{{ else }}prometheus{{ end }}]
    logs:
      receivers: [otlp]
      processors: [memory_limiter, k8sattributes, batch]
      exporters: [debug]
    traces:
      receivers: [otlp]
      processors: [memory_limiter, k8sattributes, batch]
      exporters: [debug]
{{- end }}
