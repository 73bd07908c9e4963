{{/* Objects are called after the release alone, so that addresses stay short: nsm-triton-0.nsm-triton */}}
{{- define "nsm.name" -}}
{{- $name := .Release.Name | replace "." "-" | trunc 40 | trimSuffix "-" -}}
{{- /* A Service's name begins with a letter and has no dots; a release's need not */ -}}
{{- if regexMatch "^[0-9]" $name }}nsm-{{ end }}{{ $name -}}
{{- end -}}

{{- define "nsm.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .part }}
{{- end -}}

{{- define "nsm.labels" -}}
{{ include "nsm.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end -}}

{{- define "nsm.image" -}}
{{- $tag := .image.tag | default .root.Chart.AppVersion -}}
{{ printf "%s:%s" .image.repository (kindIs "string" $tag | ternary $tag (toJson $tag)) | quote }}
{{- end -}}

{{/* As the program shall read it: a plain `quote` would write 16777216 as 1.6777216e+07. */}}
{{- define "nsm.plain" -}}
{{- if kindIs "string" . }}{{ . | quote }}{{ else }}{{ toJson . | quote }}{{ end -}}
{{- end -}}

{{/* The settings that are given: one that is null is not. As YAML, for fromYaml. */}}
{{- define "nsm.given" -}}
{{- $given := dict -}}
{{- range $name, $value := . -}}
{{- if not (kindIs "invalid" $value) }}{{ $_ := set $given $name $value }}{{ end -}}
{{- end -}}
{{- toYaml $given -}}
{{- end -}}

{{/* Kubernetes takes quantities as numbers too, and writes them as text. */}}
{{- define "nsm.resources" -}}
{{- $made := dict -}}
{{- range $part := list "requests" "limits" -}}
{{- $quantities := dict -}}
{{- range $name, $amount := dig $part dict ($ | default dict) | default dict -}}
{{- if not (kindIs "invalid" $amount) }}{{ $_ := set $quantities $name (kindIs "string" $amount | ternary $amount (toJson $amount)) }}{{ end -}}
{{- end -}}
{{- if $quantities }}{{ $_ := set $made $part $quantities }}{{ end -}}
{{- end -}}
{{- with dig "claims" list ($ | default dict) }}{{ $_ := set $made "claims" . }}{{ end -}}
{{- toYaml $made -}}
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
serviceAccountName: {{ include "nsm.name" .root | quote }}
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
{{- with .values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .values.initContainers }}
initContainers: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Of a pod: the selector's labels and its own, its own annotations and those of the chart (`notes`). */}}
{{- define "nsm.podMetadata" -}}
labels: {{- include "nsm.selector" . | nindent 2 }}
  {{- with .values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (deepCopy (.values.podAnnotations | default dict)) (.notes | default dict) }}
annotations: {{- toYaml . | nindent 2 }}
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

{{/* config.pbtxt with the parameters that are given. Values are inserted as plain text: a replacement by a pattern would read `$1` in them. */}}
{{- define "nsm.tritonConfig" -}}
{{- $config := .Files.Get "files/config.pbtxt" -}}
{{- range $parameter, $value := include "nsm.given" .Values.triton.parameters | fromYaml -}}
{{- $key := printf "key: %q value { string_value: " $parameter -}}
{{- $old := regexFind (printf "%s\"[^\"]*\"" (regexQuoteMeta $key)) $config -}}
{{- $config = replace $old (printf "%s%s" $key (include "nsm.plain" $value)) $config -}}
{{- end -}}
{{- if dig "count" 0 (.Values.triton.gpu | default dict) -}}
{{- $config = replace "instance_group [ { count: 1 } ]" "instance_group [ { count: 1 kind: KIND_GPU } ]" $config -}}
{{- end -}}
{{- $config -}}
{{- end -}}

{{/* A parameter as config.pbtxt has it in the end. */}}
{{- define "nsm.parameter" -}}
{{- regexFind (printf "key: %q value \\{ string_value: \"[^\"]*\"" .name) .config | regexFind "\"[^\"]*\"$" | trimAll "\"" -}}
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
{{- $name := printf "%s-gateway" (include "nsm.name" .) -}}
{{- $own := list $name (printf "%s.%s" $name .Release.Namespace) (printf "%s.%s.svc" $name .Release.Namespace) -}}
{{- $own = append $own (printf "%s.%s.svc.cluster.local" $name .Release.Namespace) -}}
{{- if and .Values.ingress.enabled .Values.ingress.host }}{{ $own = append $own .Values.ingress.host }}{{ end -}}
{{- if hasPrefix "*" (.Values.ingress.host | default "") }}*{{ else }}{{ join "," $own }}{{ end -}}
{{- end }}
