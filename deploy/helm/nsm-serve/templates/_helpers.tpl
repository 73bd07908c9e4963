{{/* Objects are called after the release alone, so that addresses stay short: nsm-triton-0.nsm-triton */}}
{{- define "nsm.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "nsm.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end -}}

{{- define "nsm.labels" -}}
{{ include "nsm.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end -}}

{{- define "nsm.image" -}}
{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end -}}

{{/* As the program shall read it: a plain `quote` would write 16777216 as 1.6777216e+07. */}}
{{- define "nsm.plain" -}}
{{- if kindIs "string" . }}{{ . | quote }}{{ else }}{{ toJson . | quote }}{{ end -}}
{{- end -}}

{{- define "nsm.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .user }}
runAsGroup: {{ .group }}
fsGroup: {{ .group }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "nsm.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* What every pod has. Service links would be variables such as NSM_GATEWAY_PORT, and an unknown NSM_* refuses to start. */}}
{{- define "nsm.pod" -}}
serviceAccountName: {{ include "nsm.name" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "nsm.spread" -}}
{{- if .root.Values.topologySpread.enabled }}
topologySpreadConstraints:
{{- range $key := list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
  - maxSkew: 1
    topologyKey: {{ $key }}
    whenUnsatisfiable: {{ $.root.Values.topologySpread.whenUnsatisfiable }}
    labelSelector:
      matchLabels: {{- include "nsm.selector" $ | nindent 8 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* host:port of each Triton server: gateways choose by where a state is, so each has a name of its own. */}}
{{- define "nsm.tritonUrl" -}}
{{- $name := printf "%s-triton" (include "nsm.name" .) -}}
{{- $urls := list -}}
{{- range $number := until (int .Values.triton.replicas) -}}
{{- $urls = append $urls (printf "%s-%d.%s:8001" $name $number $name) -}}
{{- end -}}
{{- join "," $urls -}}
{{- end -}}

{{- /* The names by which the gateways are called, with commas: inside the cluster, and at the ingress. */}}
{{- define "nsm.hosts" -}}
{{- $name := include "nsm.name" . -}}
{{- $own := list $name (printf "%s.%s" $name .Release.Namespace) (printf "%s.%s.svc" $name .Release.Namespace) -}}
{{- $own = append $own (printf "%s.%s.svc.cluster.local" $name .Release.Namespace) -}}
{{- if and .Values.ingress.enabled .Values.ingress.host }}{{ $own = append $own .Values.ingress.host }}{{ end -}}
{{- join "," $own -}}
{{- end }}
