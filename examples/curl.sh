#!/bin/sh
# `minipaged serve` with nothing but curl: sh curl.sh [URL]
set -eu
url="${1:-http://127.0.0.1:8000}"

echo "-- models"
curl -sS --fail "$url/v1/models"

echo; echo "-- a completion"
curl -sS --fail "$url/v1/completions" -H 'Content-Type: application/json' \
  -d '{"prompt": "ROMEO:\n", "max_tokens": 20, "temperature": 0}'

echo; echo "-- a chat, streamed"
curl -sS --fail -N "$url/v1/chat/completions" -H 'Content-Type: application/json' \
  -d '{"messages": [{"role": "user", "content": "Who goes there?"}], "max_tokens": 10, "stream": true}'

echo "-- tokens"
curl -sS --fail "$url/tokenize" -H 'Content-Type: application/json' -d '{"prompt": "to be or not to be"}'

echo; echo "-- how it is doing"
curl -sS --fail "$url/health"
curl -sS --fail "$url/metrics" | grep -E '^minipaged:(num_requests|kv_blocks|generation)' 
