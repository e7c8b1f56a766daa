{{- /*
The node agent as a native sidecar, for charts that have this one as a dependency. It outlives a
crashed trainer. In the pod's spec:

  terminationGracePeriodSeconds: {{ include "mp-agent.sidecar.graceSeconds" . }}
  securityContext: {{- include "mp-agent.sidecar.podSecurityContext" . | nindent 4 }}
  initContainers: {{- include "mp-agent.sidecar.container" . | nindent 4 }}
  volumes: {{- include "mp-agent.sidecar.volume" . | nindent 4 }}
  containers:
    - name: trainer
      env: {{- include "mp-agent.sidecar.trainerEnv" . | nindent 8 }}
      volumeMounts: {{- include "mp-agent.sidecar.volumeMount" . | nindent 8 }}
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
  envFrom:
    - configMapRef: {name: {{ include "mp-agent.settingsName" . }}, optional: true}
  ports:
    - {name: {{ .Values.podMonitor.port }}, containerPort: 9464}
  securityContext:
    runAsNonRoot: true
    runAsUser: {{ .Values.sidecar.runAsUser | int64 }}
    runAsGroup: {{ .Values.sidecar.runAsGroup | int64 }}
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities:
      drop: [ALL]
  {{- with .Values.sidecar.resources }}
  resources:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  volumeMounts:
    {{- include "mp-agent.sidecar.volumeMount" . | nindent 4 }}
    - {name: mp-agent-tmp, mountPath: /tmp}
{{- end }}

{{- define "mp-agent.sidecar.graceSeconds" -}}
{{ add .Values.sidecar.lingerSeconds 10 }}
{{- end }}

{{- define "mp-agent.sidecar.podSecurityContext" -}}
runAsUser: {{ .Values.sidecar.runAsUser | int64 }}
runAsGroup: {{ .Values.sidecar.runAsGroup | int64 }}
{{- end }}

{{- define "mp-agent.sidecar.volume" -}}
- name: mp-agent-shm
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.sidecar.sharedMemory }}}
- name: mp-agent-tmp
  emptyDir: {}
{{- end }}

{{- define "mp-agent.sidecar.volumeMount" -}}
- {name: mp-agent-shm, mountPath: /dev/shm/mp_agent}
{{- end }}

{{- define "mp-agent.sidecar.trainerEnv" -}}
- {name: MP_AGENT_NODE_AGENT, value: external}
- {name: MP_AGENT_DIR, value: /dev/shm/mp_agent}
{{- end }}
