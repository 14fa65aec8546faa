#!/usr/bin/env bash
# Launch pretrain_grpo.py on one node or, started once on each, on several.
#
#   examples/launch_grpo.sh 4 --tensor-model-parallel-size 2 --context-parallel-size 2 \
#       --loss-aggregation constant --loss-aggregation-divisor 40960
#
# The first argument is the number of processes on this node (GPUs, or CPU processes where there is no GPU); all others
# go to Megatron and override the defaults below. Several nodes: set NNODES, NODE_RANK, MASTER_ADDR (and MASTER_PORT).
# PYTHON names the interpreter; default: the repository's .venv, else python3. SCRIPT is launched in the example's place.
# Where AUDIT is set, with options or empty, the launch ends after one step with its audit: AUDIT="--json verdict.json" ...
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

[[ ${1:-} =~ ^[1-9][0-9]*$ ]] || { echo "usage: $0 PROCESSES_ON_THIS_NODE [MEGATRON FLAGS...]" >&2; exit 2; }
processes=$1
shift
root=$(dirname "$here")
if [[ -z ${PYTHON:-} ]]; then PYTHON=python3; [[ -x $root/.venv/bin/python ]] && PYTHON=$root/.venv/bin/python; fi
if [[ -d $root/megatron_rl_loss ]]; then export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"; fi # a checkout's own
export CUDA_DEVICE_MAX_CONNECTIONS=1

model=(
  --num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4
  --group-query-attention --num-query-groups 2 --normalization RMSNorm --disable-bias-linear
  --position-embedding-type rope --no-position-embedding --untie-embeddings-and-output-weights
  --attention-dropout 0 --hidden-dropout 0
  --tokenizer-type NullTokenizer --vocab-size 32 --padded-vocab-size 32
)
data=(
  --rollouts "$here/arithmetic.jsonl" --prompts-per-step 8 --dataloader-type external
  --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 4
  --eval-iters 0 --eval-interval 1000
)
training=(
  --train-iters 20 --lr 3e-3 --lr-decay-style constant --clip-grad 1.0 --weight-decay 0 --log-interval 1
)
# Without Transformer Engine: Megatron's local layers with packed_attention.py.
if ! "$PYTHON" -c 'import transformer_engine' 2>/dev/null; then
  model+=(--transformer-impl local --no-persist-layer-norm --no-rope-fusion --no-masked-softmax-fusion
    --no-bias-gelu-fusion --no-bias-dropout-fusion --cp-comm-type all_gather)
fi
# Without Apex's extension, by which Megatron's output layer adds up gradients, beside Transformer Engine's layers too.
if ! "$PYTHON" -c 'import sys, importlib.util as i; sys.exit(not i.find_spec("fused_weight_gradient_mlp_cuda"))'; then
  model+=(--no-gradient-accumulation-fusion)
fi
if "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  training+=(--bf16)
else
  # No GPU: the same stack on CPU and gloo (megatron_on_cpu.py). One thread a process.
  training+=(--distributed-backend gloo --use-cpu-initialization)
  export OMP_NUM_THREADS=1
  if [[ ${NNODES:-1} -eq 1 ]]; then export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}; fi
fi

rendezvous=(--standalone)
if [[ ${NNODES:-1} -gt 1 ]]; then
  : "${NODE_RANK:?set NODE_RANK (0 to NNODES-1)}" "${MASTER_ADDR:?set MASTER_ADDR (the first node)}"
  rendezvous=(--nnodes "$NNODES" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
fi
audit=()
# shellcheck disable=SC2206  # options, split at spaces
if [[ -n ${AUDIT+set} ]]; then audit=(-m megatron_rl_loss audit $AUDIT); fi
exec "$PYTHON" -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node "$processes" \
  "${audit[@]}" "${SCRIPT:-$here/pretrain_grpo.py}" "${model[@]}" "${data[@]}" "${training[@]}" "$@"
