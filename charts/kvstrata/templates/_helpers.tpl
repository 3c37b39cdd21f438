{{/* Labels that every object has. */}}
{{- define "kvstrata.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/name: kvstrata
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: kvstrata
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Labels that pick the pods of one component: (list $ "operator"). */}}
{{- define "kvstrata.selector" -}}
app.kubernetes.io/name: kvstrata
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* Labels of an object of one component: (list $ "operator"). */}}
{{- define "kvstrata.componentLabels" -}}
{{ include "kvstrata.labels" (index . 0) }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* Image reference: (list $ .Values.operator.image). A digest beats a tag. */}}
{{- define "kvstrata.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- with $root.Values.image.registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{- $image.repository -}}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $image.tag | default $root.Chart.AppVersion }}{{ end -}}
{{- end }}

{{/* Name of the Secret with url, username and password of one Redis role: (list $ "agent"). */}}
{{- define "kvstrata.redisSecret" -}}
{{- $root := index . 0 -}}
{{- $role := index . 1 -}}
{{- index $root.Values.redis.existingSecrets $role | default (printf "kvstrata-redis-%s" $role) -}}
{{- end }}

{{/* Password of one Redis role: a given one, what the cluster holds already, or a new one: (list $ "agent"). */}}
{{- define "kvstrata.redisPassword" -}}
{{- $root := index . 0 -}}
{{- $given := index $root.Values.redis.passwords (index . 1) -}}
{{- $held := lookup "v1" "Secret" $root.Release.Namespace (include "kvstrata.redisSecret" .) -}}
{{- if $given -}}{{ $given }}
{{- else if and $held $held.data $held.data.password -}}{{ $held.data.password | b64dec }}
{{- else -}}{{ randAlphaNum 40 }}
{{- end -}}
{{- end }}

{{/* True when this chart runs Redis. */}}
{{- define "kvstrata.runsRedis" -}}
{{- if and .Values.processes.enabled (has .Values.redis.mode (list "Embedded" "StatefulSet")) }}true{{ end -}}
{{- end }}

{{/* Replicas of the metadata service: a Redis that is its child has one address, and a second one would be another directory. */}}
{{- define "kvstrata.metadataReplicas" -}}
{{- if eq .Values.redis.mode "Process" }}1{{ else }}{{ .Values.metadata.replicas }}{{ end -}}
{{- end }}

{{/* Scheduling and security of a pod: (list $ .Values.operator). */}}
{{- define "kvstrata.podSettings" -}}
{{- $root := index . 0 -}}
{{- $part := index . 1 -}}
securityContext:
  {{- toYaml $root.Values.podSecurityContext | nindent 2 }}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $part.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $part.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $part.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $part.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* What the values add to a container of a part: (list .Values.operator "extraEnv"). Nothing where they add nothing. */}}
{{- define "kvstrata.extra" -}}
{{- with index (index . 0) (index . 1) }}{{ toYaml . }}{{ end -}}
{{- end }}

{{/* Arguments that all processes take. */}}
{{- define "kvstrata.commonArgs" -}}
- --log-level={{ .Values.logLevel }}
{{- with .Values.tracing }}
{{- if .otlpEndpoint }}
- --otlp-endpoint={{ .otlpEndpoint }}
- --trace-ratio={{ .ratio }}
- --trace-slow-seconds={{ .slowSeconds }}
{{- end }}
{{- end }}
{{- end }}

{{/* Where operator and agents have the fleet's KEKs from, when that is a file. */}}
{{- define "kvstrata.kekArgs" -}}
{{- if and .Values.kek.volume (not .Values.kek.file) }}
{{- fail "kek.file is missing: the path at which processes read what kek.volume holds" }}
{{- end }}
{{- if and .Values.kek.volume (has (dir .Values.kek.file) (list "/tmp" "/dev/hugepages" "/run/kvstrata-memory" "/var/run/secrets/kvstrata.io")) }}
{{- fail (printf "kek.file %s: processes have something else mounted at %s; give it a folder of its own" .Values.kek.file (dir .Values.kek.file)) }}
{{- end }}
{{- with .Values.kek.file }}
- --kek-file={{ . }}
{{- end }}
{{- end }}

{{/* Mount of that file's folder. */}}
{{- define "kvstrata.kekMount" -}}
{{- if .Values.kek.volume }}
- {name: kek, mountPath: {{ dir .Values.kek.file }}, readOnly: true}
{{- end }}
{{- end }}

{{/* Volume of that file. */}}
{{- define "kvstrata.kekVolume" -}}
{{- with .Values.kek.volume }}
# The keys that wrap data keys, from outside of the cluster's Secrets.
- name: kek
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Probes on the metrics port. Liveness is slow to judge: a restart costs more than a late answer. */}}
{{- define "kvstrata.probes" -}}
startupProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 2
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 10
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: metrics}
  periodSeconds: 5
{{- end }}


{{/* Condition of every policy: `system:masters` stands above RBAC, and a policy in its way would only be removed by it. */}}
{{- define "kvstrata.notMasters" -}}
- name: not-masters
  expression: '!("system:masters" in request.userInfo.?groups.orValue([]))'
{{- end }}

{{/* Condition of policies on deletions: the cluster's own controllers collect what has lost its owner. */}}
{{- define "kvstrata.notControllers" -}}
- name: not-controllers
  expression: '!request.userInfo.username.startsWith("system:serviceaccount:kube-system:")'
{{- end }}

{{/* Binding of a policy, everywhere: (list $ "kvstrata-shares"). */}}
{{- define "kvstrata.policyBinding" -}}
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata:
  name: {{ index . 1 }}
  labels:
    {{- include "kvstrata.labels" (index . 0) | nindent 4 }}
spec:
  policyName: {{ index . 1 }}
  validationActions: [Deny]
{{- end }}

{{/* Command that gives folders to the agents' user, as a list: isolated from the environment and the working directory. */}}
{{- define "kvstrata.foldersCommand" -}}
{{- list "python3" "-I" "-m" "kvstrata_node.folders" | toJson -}}
{{- end }}

{{/* What an agent's image must match, as CEL of container `c`: its digest, or with agentImages: Tag a tag of the chart's repository. */}}
{{- define "kvstrata.agentImageRule" -}}
c.image.matches("@sha256:[0-9a-f]{64}$")
{{- if eq .Values.admissionPolicies.agentImages "Tag" }} || c.image.startsWith({{ printf "%s:" (regexReplaceAll "[:@][^/]*$" (include "kvstrata.image" (list . .Values.agent.image)) "") | toJson }})
{{- end }}
{{- end }}

{{/* The same for people. */}}
{{- define "kvstrata.agentImageMessage" -}}
{{- if eq .Values.admissionPolicies.agentImages "Tag" -}}
an agent's image is one of the repository that the chart names
{{- else -}}
an agent's image is named by its digest, repository@sha256:...: set agent.image.digest, or admissionPolicies.agentImages=Tag
{{- end -}}
{{- end }}

{{/* True when the cluster has this object of a kind of ours already: (list $ "KVPool" "demo"). */}}
{{- define "kvstrata.exists" -}}
{{- $root := index . 0 -}}
{{- if $root.Capabilities.APIVersions.Has (printf "kvstrata.io/v1alpha1/%s" (index . 1)) -}}
{{- if lookup "kvstrata.io/v1alpha1" (index . 1) "" (index . 2) }}true{{ end -}}
{{- end -}}
{{- end }}

{{/* Metadata of what is made once, after all else, and is nobody's but the administrator's then. */}}
{{- define "kvstrata.onceOnly" -}}
labels:
  {{- include "kvstrata.labels" . | nindent 2 }}
annotations:
  helm.sh/hook: post-install
  helm.sh/hook-delete-policy: hook-failed
{{- end }}
