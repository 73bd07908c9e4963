{{/* Written by deploy.helm.write: settings of an engine in the gateway */}}
{{- define "nsm.engineSettings" -}}NSM_WORKERS NSM_DEVICE NSM_EXECUTOR NSM_NUM_THREADS NSM_MAX_SLOTS NSM_TOKEN_BUDGET NSM_QUEUE_LIMIT NSM_SPECULATION NSM_ENERGY NSM_FINE_TUNING_JOBS{{- end }}
