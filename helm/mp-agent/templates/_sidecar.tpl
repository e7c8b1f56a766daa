{{- /*
The node agent as a native sidecar, for charts that have this one as a dependency: README.md shows
the pod. Every template here takes this chart's own context, which the parent has as
`index .Subcharts "mp-agent"`.
*/}}
{{- define "mp-agent.sidecar.container" -}}
- name: mp-agent
  image: {{ include "mp-agent.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  restartPolicy: Always
  args: [node]
  env:
    - {name: MP_AGENT_DIR, value: /dev/shm/mp_agent}
    - {name: MP_AGENT_LINGER_SECONDS, value: {{ .Values.sidecar.lingerSeconds | quote }}}
    {{- with .Values.sidecar.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  envFrom:
    - configMapRef: {name: {{ include "mp-agent.settingsName" . }}, optional: true}
    {{- with .Values.sidecar.envFrom }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  ports:
    - {name: {{ .Values.podMonitor.port }}, containerPort: {{ include "mp-agent.port" . }}}
  securityContext:
    {{- include "mp-agent.containerSecurityContext" . | nindent 4 }}
  {{- with .Values.sidecar.resources }}
  resources:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  volumeMounts:
    {{- include "mp-agent.sidecar.volumeMount" . | nindent 4 }}
    - {name: mp-agent-tmp, mountPath: /tmp}
    {{- with .Values.sidecar.volumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{- define "mp-agent.sidecar.graceSeconds" -}}
{{ add .Values.sidecar.lingerSeconds 10 }}
{{- end }}

{{- /* One user for trainer and sidecar: a ring is readable by its owner alone. */}}
{{- define "mp-agent.sidecar.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: {{ .Values.sidecar.runAsUser | int64 }}
runAsGroup: {{ .Values.sidecar.runAsGroup | int64 }}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "mp-agent.sidecar.volumes" -}}
- name: mp-agent-shm
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.sidecar.sharedMemory }}}
- name: mp-agent-tmp
  emptyDir: {sizeLimit: {{ .Values.sidecar.temporaryFiles }}}
{{- with .Values.sidecar.volumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "mp-agent.sidecar.volumeMount" -}}
- {name: mp-agent-shm, mountPath: /dev/shm/mp_agent}
{{- end }}

{{- define "mp-agent.sidecar.trainerEnv" -}}
- {name: MP_AGENT_NODE_AGENT, value: external}
- {name: MP_AGENT_DIR, value: /dev/shm/mp_agent}
{{- end }}
