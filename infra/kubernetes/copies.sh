#!/usr/bin/env bash
# Brings the copies in base/files in line with their originals: kustomize reads nothing outside its own directory.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
cp compose/mlflow.sh compose/buckets.py prometheus/alerts.yml grafana/orchestrator.json kubernetes/base/files/
cp grafana/provisioning/dashboards/orchestrator.yaml kubernetes/base/files/dashboards.yaml
cp grafana/provisioning/datasources/prometheus.yaml kubernetes/base/files/datasources.yaml
