#!/usr/bin/env bash
# Makes the secrets that clusters/kuberay needs, once; those that exist are left alone.
#
#   clusters/kuberay/secrets.sh [NAMESPACE]
#
# store-credentials: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, where they are set, AWS_REGION and AWS_ENDPOINT_URL_S3 (of a
# server that is not Amazon's) are taken from this shell's environment. redis-password is drawn at random. Nothing is printed,
# nothing is written to a file.
set -euo pipefail

namespace=${1:-pretraining}

exists() {
  kubectl --namespace "$namespace" get secret "$1" --output name >/dev/null 2>&1
}

# By standard input: arguments stand in every listing of processes.
create() {
  kubectl --namespace "$namespace" create secret generic "$1" --from-env-file=/dev/stdin
}

if ! exists store-credentials; then
  : "${AWS_ACCESS_KEY_ID:?set it to the key of the account that may use the bucket}"
  : "${AWS_SECRET_ACCESS_KEY:?set it to the secret of that key}"
  [[ -z ${AWS_SESSION_TOKEN:-} ]] || { echo "error: keys with AWS_SESSION_TOKEN end within hours; give lasting ones" >&2; exit 2; }
fi
kubectl get namespace "$namespace" --output name >/dev/null 2>&1 ||
  kubectl create --filename "$(dirname "${BASH_SOURCE[0]}")/namespace.yaml"
if ! exists redis-password; then
  printf 'password=%s\n' "$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')" | create redis-password
fi
if ! exists store-credentials; then
  {
    printf 'AWS_ACCESS_KEY_ID=%s\nAWS_SECRET_ACCESS_KEY=%s\n' "$AWS_ACCESS_KEY_ID" "$AWS_SECRET_ACCESS_KEY"
    for name in AWS_REGION AWS_ENDPOINT_URL_S3; do
      if [[ -n ${!name:-} ]]; then printf '%s=%s\n' "$name" "${!name}"; fi
    done
  } | create store-credentials
fi
