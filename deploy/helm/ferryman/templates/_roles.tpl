{{/* Changes a pod of ours: what it is told, what it mounts. Context: root, pod, container, role, name. */}}
{{- define "ferryman.role" -}}
{{- $values := .root.Values }}
{{- $role := .role }}
{{- $env := dict "drain_seconds" $role.drainSeconds }}
{{- with $values.nats.url | default ($values.tls.enabled | ternary "tls://nats:4222" "") }}
{{- $_ := set $env "nats_url" . }}
{{- end }}
{{- if has .name (list "router" "host-cache") }}
{{- with $values.redis.url | default ($values.tls.enabled | ternary "rediss://redis:6379/0" "") }}
{{- $_ := set $env "redis_url" . }}
{{- end }}
{{- end }}
{{- if ne .name "host-cache" }}
{{- $_ := set $env "model" $values.model.path }}
{{- include "ferryman.weights" . }}
{{- end }}
{{- if eq .name "router" }}
{{- $_ := set $env "served_name" $values.model.servedName }}
{{- with $role.apiKeysSecret }}
{{- $_ := set $env "api_keys_file" "/etc/ferryman/api-keys/keys.toml" }}
{{- include "ferryman.secret" (dict "pod" $.pod "container" $.container "name" "api-keys" "secret" .) }}
{{- end }}
{{- else if eq .name "host-cache" }}
{{- include "ferryman.storage" (dict "env" $env "container" .container "role" $role) }}
{{- else }}
{{- include "ferryman.worker" (merge (dict "env" $env "model" $values.model) .) }}
{{- end }}
{{- if $values.tls.enabled }}
{{- $_ := set $env "tls_dir" "/etc/ferryman/tls" }}
{{- $secret := printf "%s-tls" (replace "-" "" .name) }}
{{- include "ferryman.secret" (dict "pod" .pod "container" .container "name" "tls" "secret" $secret) }}
{{- if eq .name "router" }}
{{- range list "startupProbe" "livenessProbe" "readinessProbe" }}
{{- $_ := set (get $.container .).httpGet "scheme" "HTTPS" }}
{{- end }}
{{- end }}
{{- end }}
{{- include "ferryman.environment" (dict "container" .container "env" (merge $env (deepCopy $role.settings))) }}
{{- end }}

{{/* Ranks on cards speak by NCCL, which shares memory in /dev/shm: of that a container has 64 MB.
Context: env, pod, container, role, name, model. */}}
{{- define "ferryman.worker" -}}
{{- $_ := set .env "dtype" .model.dtype }}
{{- $_ := set .env "page_size" .model.pageSize }}
{{- $_ := set .env "memory_bytes" .role.memoryBytes }}
{{- if gt (int .role.ranks) 1 }}{{ $_ := set .env "tp_size" .role.ranks }}{{ end }}
{{- if .role.gpus }}
{{- if gt (int .role.ranks) (int .role.gpus) }}
{{- fail (printf "%s.ranks is %d and %s.gpus %d: each rank wants a card of its own" .name (int .role.ranks) .name (int .role.gpus)) }}
{{- end }}
{{- $_ := set .env "device" "cuda" }}
{{- if not (hasKey .role.settings "chunk_tokens") }}{{ $_ := set .env "chunk_tokens" 2048 }}{{ end }}
{{- $_ := set .container.resources.limits "nvidia.com/gpu" .role.gpus }}
{{- if gt (int .role.ranks) 1 }}
{{- $_ := set .pod "volumes" (append .pod.volumes (dict "name" "shm" "emptyDir" (dict "medium" "Memory"))) }}
{{- $_ := set .container "volumeMounts" (append .container.volumeMounts (dict "name" "shm" "mountPath" "/dev/shm")) }}
{{- end }}
{{- end }}
{{- end }}

{{/* NATS and Redis that speak TLS alone. Context: pod, container, name. */}}
{{- define "ferryman.server" -}}
{{- include "ferryman.secret" (dict "pod" .pod "container" .container "name" "tls" "secret" (printf "%s-tls" .name)) }}
{{- $files := printf "/etc/ferryman/tls/%s" .name }}
{{- $ca := "/etc/ferryman/tls/ca.crt" }}
{{- $args := list "--tls" "--tlscert" (printf "%s.crt" $files) "--tlskey" (printf "%s.key" $files) "--tlscacert" $ca }}
{{- if eq .name "redis" }}
{{- $args = list "--port" "0" "--tls-port" "6379" "--tls-auth-clients" "no" "--tls-ca-cert-file" $ca
      "--tls-cert-file" (printf "%s.crt" $files) "--tls-key-file" (printf "%s.key" $files) }}
{{- range list "livenessProbe" "readinessProbe" }}
{{- $exec := (get $.container .).exec }}
{{- $_ := set $exec "command" (list "sh" "-c" (replace "redis-cli" "redis-cli --tls --insecure" (last $exec.command))) }}
{{- end }}
{{- end }}
{{- $_ := set .container "args" (concat .container.args $args) }}
{{- end }}

{{/* Each node owns its objects, under its own name. Context: env, container, role. */}}
{{- define "ferryman.storage" -}}
{{- $store := .role.objectStore }}
{{- $_ := set .env "host_memory" .role.hostMemory }}
{{- $_ := set .env "storage_bytes" .role.storageBytes }}
{{- with $store.url }}
{{- $query := empty $store.query | ternary "" (printf "?%s" $store.query) }}
{{- $_ := set $.env "storage_dir" (printf "%s/$(FERRYMAN_NODE)%s" (trimSuffix "/" .) $query) }}
{{- end }}
{{- with $store.secret }}
{{- $_ := set $.container "envFrom" (list (dict "secretRef" (dict "name" .))) }}
{{- end }}
{{- end }}

{{/* The volume with the model, where there is one. Context: root, pod, container. */}}
{{- define "ferryman.weights" -}}
{{- $model := .root.Values.model }}
{{- $mounted := hasPrefix "/weights/" $model.path }}
{{- if and $model.volume (not $mounted) }}
{{- fail (printf "model.volume is mounted at /weights, and model.path is %s: give its folder below /weights" $model.path) }}
{{- else if and $mounted (not $model.volume) }}
{{- fail (printf "model.path is %s, and nothing is mounted at /weights: give model.volume" $model.path) }}
{{- else if $mounted }}
{{- $_ := set .pod "volumes" (append .pod.volumes (merge (dict "name" "weights") $model.volume)) }}
{{- $mount := dict "name" "weights" "mountPath" "/weights" "readOnly" true }}
{{- $_ := set .container "volumeMounts" (append .container.volumeMounts $mount) }}
{{- end }}
{{- end }}

{{/* Mounts a secret at /etc/ferryman/NAME. Context: pod, container, name, secret. */}}
{{- define "ferryman.secret" -}}
{{- $volume := dict "name" .name "secret" (dict "secretName" .secret "defaultMode" 288) }}
{{- $_ := set .pod "volumes" (append .pod.volumes $volume) }}
{{- $mount := dict "name" .name "mountPath" (printf "/etc/ferryman/%s" .name) "readOnly" true }}
{{- $_ := set .container "volumeMounts" (append .container.volumeMounts $mount) }}
{{- end }}

{{/* Sets variables by the settings' names: in their place, for others are made of them; new ones at
the end. Context: container, env. */}}
{{- define "ferryman.environment" -}}
{{- $left := deepCopy .env }}
{{- $variables := list }}
{{- range .container.env }}
{{- $name := lower (trimPrefix "FERRYMAN_" .name) }}
{{- if hasKey $left $name }}
{{- $variables = append $variables (dict "name" .name "value" (include "ferryman.text" (get $left $name))) }}
{{- $_ := unset $left $name }}
{{- else }}
{{- $variables = append $variables . }}
{{- end }}
{{- end }}
{{- range $name, $value := $left }}
{{- $variable := dict "name" (printf "FERRYMAN_%s" (upper $name)) "value" (include "ferryman.text" $value) }}
{{- $variables = append $variables $variable }}
{{- end }}
{{- $_ := set .container "env" $variables }}
{{- end }}

{{/* A value as a variable has it: toString would write 1000000 as 1e+06. */}}
{{- define "ferryman.text" -}}
{{- if kindIs "string" . }}{{ . }}{{ else }}{{ toJson . }}{{ end }}
{{- end }}
