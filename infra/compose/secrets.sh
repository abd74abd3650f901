#!/usr/bin/env bash
# Draws the passwords and keys of the compose stack, once: files that exist are left alone.
#
#   infra/compose/secrets.sh [DIRECTORY]     default: secrets/ beside this file, which git ignores
#
# The containers read the files as their own users, so the files are readable for all and the directory for its owner only.
set -euo pipefail

directory=${1:-$(dirname "${BASH_SOURCE[0]}")/secrets}
mkdir -p "$directory"
chmod 0700 "$directory"
umask 0133

draw() {
  head -c "$1" /dev/urandom | od -An -tx1 | tr -d ' \n'
}

# Of a name and a text; the text comes by standard input, because arguments stand in every listing of processes.
keep() {
  local path="$directory/$1"
  if [[ -e $path ]]; then
    cat >/dev/null
  else
    cat >"$path.new" && mv "$path.new" "$path"
    echo "made $path"
  fi
}

# Files that belong together are drawn together: either all of them are there, or all are made.
if [[ ! -e $directory/s3_identities || ! -e $directory/s3_credentials ]]; then
  key=$(draw 10) secret=$(draw 20)
  rm -f "$directory/s3_identities" "$directory/s3_credentials"
  printf '{"identities": [{"name": "pretraining", "credentials": [{"accessKey": "%s", "secretKey": "%s"}], "actions": ["Admin", "Read", "Write", "List", "Tagging"]}]}\n' "$key" "$secret" | keep s3_identities
  printf '[default]\naws_access_key_id = %s\naws_secret_access_key = %s\n' "$key" "$secret" | keep s3_credentials
fi
if [[ ! -e $directory/mlflow_auth || ! -e $directory/mlflow_credentials ]]; then
  password=$(draw 20)
  rm -f "$directory/mlflow_auth" "$directory/mlflow_credentials"
  printf '[mlflow]\ndefault_permission = READ\ndatabase_uri = sqlite:////home/pretraining/mlflow/auth.db\nadmin_username = admin\nadmin_password = %s\nauthorization_function = mlflow.server.auth:authenticate_request_basic_auth\n' "$password" | keep mlflow_auth
  printf '[mlflow]\nmlflow_tracking_username = admin\nmlflow_tracking_password = %s\n' "$password" | keep mlflow_credentials
fi
draw 24 | keep postgres_password
draw 32 | keep mlflow_server_key
draw 32 | keep ray_token
draw 16 | keep grafana_password
