{{/* "yes" for an object that these values leave in. Context: Values, object. */}}
{{- define "ferryman.wanted" -}}
{{- $server := get (dict "nats" .Values.nats "redis" .Values.redis) .object.metadata.name | default dict }}
{{- $unruled := and (eq .object.kind "NetworkPolicy") (not .Values.network.policies) }}
{{- if not (or $server.url $unruled) }}yes{{ end }}
{{- end }}

{{/* Changes an object of objects/ by the values; writes nothing. Context: root, object. */}}
{{- define "ferryman.change" -}}
{{- $object := .object }}
{{- $values := .root.Values }}
{{- $_ := set $object.metadata "labels" (dict
      "app.kubernetes.io/part-of" "ferryman"
      "app.kubernetes.io/instance" .root.Release.Name
      "app.kubernetes.io/managed-by" .root.Release.Service
      "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version)) }}
{{- $roles := dict "router" $values.router "prefill" $values.prefill "decode" $values.decode
      "host-cache" $values.hostCache "nats" $values.nats "redis" $values.redis }}
{{- $role := get $roles $object.metadata.name | default dict }}
{{- if has $object.kind (list "Deployment" "StatefulSet" "DaemonSet") }}
{{- include "ferryman.workload" (dict "root" .root "object" $object "role" $role) }}
{{- else if and (eq $object.kind "ServiceAccount") $role.accountAnnotations }}
{{- $_ := set $object.metadata "annotations" $role.accountAnnotations }}
{{- else if and (eq $object.kind "Service") $role.service }}
{{- $_ := set $object.spec "type" $role.service.type }}
{{- with $role.service.annotations }}{{ $_ := set $object.metadata "annotations" . }}{{ end }}
{{- else if and (eq $object.kind "NetworkPolicy") (eq $object.metadata.name "names") }}
{{- $_ := set $object.spec "egress" (concat $object.spec.egress $values.network.egress) }}
{{- end }}
{{- end }}

{{/* Changes all that the pods of a role have in common. Context: root, object, role. */}}
{{- define "ferryman.workload" -}}
{{- $values := .root.Values }}
{{- $role := .role }}
{{- $spec := .object.spec }}
{{- $pod := $spec.template.spec }}
{{- $container := first $pod.containers }}
{{- $_ := set $spec.template.metadata.labels "app.kubernetes.io/part-of" "ferryman" }}
{{- $image := printf "%s:%s" $values.image.repository (default .root.Chart.AppVersion $values.image.tag) }}
{{- range concat $pod.containers ($pod.initContainers | default list) }}
{{- $_ := set . "image" (default $image $role.image) }}
{{- if $values.image.pullPolicy }}
{{- $_ := set . "imagePullPolicy" $values.image.pullPolicy }}
{{- end }}
{{- end }}
{{- range $values.image.pullSecrets }}
{{- $_ := set $pod "imagePullSecrets" (append ($pod.imagePullSecrets | default list) (dict "name" .)) }}
{{- end }}
{{- $_ := set $container "resources" (mergeOverwrite $container.resources (deepCopy $role.resources)) }}
{{- $_ := mergeOverwrite $pod (deepCopy $role.pod) }}
{{- if $role.replicas }}{{ $_ := set $spec "replicas" $role.replicas }}{{ end }}
{{- if and (ne $values.autoscale.by "none") (hasKey $values.autoscale .object.metadata.name) }}
{{- $_ := unset $spec "replicas" }}
{{- end }}
{{- if $role.drainSeconds }}
{{- $_ := set $pod "terminationGracePeriodSeconds" (add $role.drainSeconds 15) }}
{{- include "ferryman.role" (dict "root" .root "pod" $pod "container" $container "role" $role "name" .object.metadata.name) }}
{{- else if $values.tls.enabled }}
{{- include "ferryman.server" (dict "pod" $pod "container" $container "name" .object.metadata.name) }}
{{- end }}
{{- end }}
