{{/* What all objects have in common; called with the root and the name of a part. */}}

{{- define "penstock.labels" -}}
app.kubernetes.io/name: {{ .part }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- end }}

{{- define "penstock.metadata" -}}
name: {{ .root.Release.Name }}-{{ .part }}
labels:
  {{- include "penstock.labels" . | nindent 2 }}
{{- end }}

{{- define "penstock.pod" -}}
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "penstock.container" -}}
name: {{ .part }}
image: "{{ .root.Values.image.repository }}:{{ .root.Values.image.tag }}"
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
env:
  - name: PENSTOCK_BOOTSTRAP_SERVERS
    value: {{ .root.Values.kafka.bootstrapServers | quote }}
envFrom:
  - secretRef:
      name: {{ .root.Values.kafka.existingSecret | default (printf "%s-kafka" .root.Release.Name) }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}
