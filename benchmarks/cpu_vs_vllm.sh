#!/usr/bin/env bash
# firsttoken beside vLLM on this machine's CPU, in one run and in turn; see cpu_vs_vllm.py for what is measured.
#
#   PEERS=DIR benchmarks/cpu_vs_vllm.sh [--repeats 3] [--json out/cpu_vs_vllm.json] …
#
# PEERS holds vllm-cpu/setup.sh, serve.sh, stop.sh and stream_bench.py. vLLM is installed by its setup.sh on
# first use (3.4 GB). PYTHON is an interpreter that has firsttoken, by default that of .venv. Needs bash and
# Linux (PSS is read from /proc). Takes about 15 minutes for 3 repeats on 2 cores; nothing else should run.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
MODEL=${MODEL:-smollm2-135m}
[ -n "${PEERS:-}" ] || { echo "error: set PEERS to the folder that holds vllm-cpu/" >&2; exit 2; }
[ -x "$PEERS/vllm-cpu/serve.sh" ] || { echo "error: no vllm-cpu/serve.sh in PEERS=$PEERS" >&2; exit 2; }
[ -x "$(command -v "$PYTHON")" ] || { echo "error: no $PYTHON: run make setup, or set PYTHON" >&2; exit 2; }
[ -x "${PEER_HOME:-$HOME/.cache/peers/vllm-cpu}/venv/bin/vllm" ] || bash "$PEERS/vllm-cpu/setup.sh"
exec "$PYTHON" benchmarks/cpu_vs_vllm.py --peers "$PEERS/vllm-cpu" --model "$MODEL" "$@"
