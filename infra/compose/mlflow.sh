#!/bin/sh
# MLflow's server in the compose stack and on Kubernetes. Passwords come from files and go by the environment: arguments stand
# in every listing of processes. MLFLOW_BUCKET is where artifacts go.
set -eu

MLFLOW_BACKEND_STORE_URI="postgresql+psycopg://mlflow:$(cat /run/secrets/postgres_password)@postgres:5432/mlflow"
MLFLOW_FLASK_SERVER_SECRET_KEY=$(cat /run/secrets/mlflow_server_key)
export MLFLOW_BACKEND_STORE_URI MLFLOW_FLASK_SERVER_SECRET_KEY
exec mlflow server --app-name basic-auth --host 0.0.0.0 --port 5000 --workers 2 --artifacts-destination "s3://$MLFLOW_BUCKET"
