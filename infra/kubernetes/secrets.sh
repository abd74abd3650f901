#!/usr/bin/env bash
# Draws the passwords and keys of infra/kubernetes, once, and hands them to the cluster: secrets that exist are left alone, and
# those that are missing beside `services` are made of its values.
#
#   infra/kubernetes/secrets.sh [small|production]     the overlay; default: small
#
# They pass through a directory that only you may read and that is gone afterwards. `services` is for the services,
# `store-credentials` and `mlflow-credentials` for a Ray cluster in the namespace pretraining.
#
# `production` has no S3 server: the keys and the region of its bucket are taken from this shell's environment
# (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION), and clusters/kuberay/secrets.sh makes `store-credentials`.
set -euo pipefail

overlay=${1:-small}
case $overlay in
  small | production) ;;
  *)
    echo "error: the overlay is '$overlay'; write small or production" >&2
    exit 2
    ;;
esac

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
services=pretraining-services
cluster=pretraining
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT

exists() {
  kubectl --namespace "$1" get secret "$2" --output name >/dev/null 2>&1
}

for file in "$here/base/namespace.yaml" "$here/../../clusters/kuberay/namespace.yaml"; do
  kubectl apply --filename "$file"
done
if exists "$services" services; then
  echo "secret services is there already: nothing is drawn"
  for part in s3_credentials mlflow_auth; do
    kubectl --namespace "$services" get secret services \
      --output "go-template={{index .data \"$part\" | base64decode}}" >"$directory/$part"
  done
else
  if [[ $overlay == production ]]; then
    : "${AWS_ACCESS_KEY_ID:?set it to the key of the account that may use the bucket}"
    : "${AWS_SECRET_ACCESS_KEY:?set it to the secret of that key}"
    : "${AWS_REGION:?set it to the region of the bucket}"
    [[ -z ${AWS_SESSION_TOKEN:-} ]] || { echo "error: keys with AWS_SESSION_TOKEN end within hours; give lasting ones" >&2; exit 2; }
  fi
  "$here/../compose/secrets.sh" "$directory" >/dev/null
  if [[ $overlay == production ]]; then
    printf '[default]\naws_access_key_id = %s\naws_secret_access_key = %s\nregion = %s\n' \
      "$AWS_ACCESS_KEY_ID" "$AWS_SECRET_ACCESS_KEY" "$AWS_REGION" >"$directory/s3_credentials"
  fi
  kubectl --namespace "$services" create secret generic services \
    --from-file="$directory/postgres_password" --from-file="$directory/s3_identities" \
    --from-file="$directory/s3_credentials" --from-file="$directory/mlflow_auth" \
    --from-file="$directory/mlflow_server_key" --from-file="$directory/grafana_password"
fi

# The INI files of the services as the variables that a Ray cluster's pods take.
read_ini() {
  sed -n "s/^$2 = //p" "$directory/$1"
}
# Only production has a region there, and its store is not the one that is named here.
if [[ $overlay == small && -n $(read_ini s3_credentials region) ]]; then
  echo "error: the secret services is that of production; give the argument production" >&2
  exit 2
fi
if [[ $overlay == small ]] && ! exists "$cluster" store-credentials; then
  printf 'AWS_ACCESS_KEY_ID=%s\nAWS_SECRET_ACCESS_KEY=%s\nAWS_REGION=us-east-1\nAWS_ENDPOINT_URL_S3=http://s3.%s:8333\n' \
    "$(read_ini s3_credentials aws_access_key_id)" "$(read_ini s3_credentials aws_secret_access_key)" "$services" |
    kubectl --namespace "$cluster" create secret generic store-credentials --from-env-file=/dev/stdin
fi
if ! exists "$cluster" mlflow-credentials; then
  printf 'MLFLOW_TRACKING_URI=http://mlflow.%s:5000\nMLFLOW_TRACKING_USERNAME=admin\nMLFLOW_TRACKING_PASSWORD=%s\n' \
    "$services" "$(read_ini mlflow_auth admin_password)" |
    kubectl --namespace "$cluster" create secret generic mlflow-credentials --from-env-file=/dev/stdin
fi
