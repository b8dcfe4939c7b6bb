"""Grafana dashboards as code: panels.py builds and checks, boards.py says what is shown."""
