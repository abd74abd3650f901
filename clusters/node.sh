#!/usr/bin/env bash
# One node of a Ray cluster, in the foreground: node.sh head|member, until told to end by SIGTERM. In a Slurm allocation a
# second argument `member` says that the head is in another one.
#
# The head serves the sweeps of a store (`orchestrator serve`); members join it, join it again after an outage, and on
# SIGTERM have the attempts on them write a checkpoint and start elsewhere. Used by slurm/ray.sbatch, by service units
# of bare machines (docs/hosts.md), and by tests. Settings, all by environment:
#
#   ORCHESTRATOR_STORE         the store that all nodes reach, s3://bucket/prefix
#   ORCHESTRATOR_CLUSTER       name of the cluster in the store
#   ORCHESTRATOR_SHARED        directory that all nodes see, where the head says its address; or instead of it
#   ORCHESTRATOR_HEAD          the head's address, host:port
#   RAY_AUTH_TOKEN_PATH        file with the token that every member and client must show
#   ORCHESTRATOR_IDLE_S        end the head when no sweep has been unfinished for so long; default: never
#   ORCHESTRATOR_GRACE_S       seconds for checkpoints after SIGTERM; default 90
#   ORCHESTRATOR_NOTICE_FILE   its appearance means the same as SIGTERM, where signals reach Ray's processes as well
#   ORCHESTRATOR_NODE_ADDRESS  of this node, where it has several; default: the first one
#   ORCHESTRATOR_NODE_CPUS     default: all; ORCHESTRATOR_NODE_GPUS, ORCHESTRATOR_NODE_MEMORY_BYTES: default: those of the
#                              allocation, else what Ray finds
#   ORCHESTRATOR_NODE_LABELS   ray.io/market-type=spot,... ; see docs/scheduling.md
#   ORCHESTRATOR_RAY_TMP       directory where the node makes, and deletes, a folder for Ray's sessions; default: /tmp. At most 23
#                              characters: a path of a socket may have 107, of which Ray takes the rest
#   ORCHESTRATOR_RAY_PORT, ORCHESTRATOR_OBJECT_STORE_BYTES   Ray's own, where its defaults do not fit
set -euo pipefail
role=${1:?head or member}
allocation="${SLURM_JOB_ID:+${2:-head}}"
host=$(hostname)
# Head and member may be on one machine; Ray refuses labels above 63 characters.
name="${SLURM_JOB_ID:-${host:0:56}-$role}${SLURM_PROCID:+-$SLURM_PROCID}"
shared="${ORCHESTRATOR_SHARED:-}"
grace_s="${ORCHESTRATOR_GRACE_S:-90}"
address="${ORCHESTRATOR_NODE_ADDRESS:-$(hostname -I | cut -d' ' -f1)}"
port="${ORCHESTRATOR_RAY_PORT:-6379}"
if [[ $role == head ]]; then cluster="$address:$port"; else cluster="${ORCHESTRATOR_HEAD:-$shared}"; fi
# Nothing else is deleted. Nodes may share the directory, a machine may have nodes of several clusters, and the name of a host
# may be long.
temporary="${ORCHESTRATOR_RAY_TMP:-/tmp}/ray-$(printf %08x "$(cksum <<<"$name $cluster" | cut -d' ' -f1)")"
ENDED=75 # of a function: worth another try
start_s=180 # for Ray to come up on a busy node
join_s=900  # for the head to be there: its machine may be starting still, its allocation may be queued
[[ $role == head || -n $shared || -n ${ORCHESTRATOR_HEAD:-} ]] || {
  echo "error: a member must know its head: set ORCHESTRATOR_HEAD=host:port, or ORCHESTRATOR_SHARED" >&2
  exit 2
}
[[ -s ${RAY_AUTH_TOKEN_PATH:-} ]] || {
  echo "error: set RAY_AUTH_TOKEN_PATH to the file with the cluster's token (ray get-auth-token --generate)" >&2
  exit 2
}

# Every open shard and every actor holds file descriptors.
ulimit -n "$(ulimit -Hn)"
export RAY_AUTH_MODE=token RAY_TRAIN_ENABLE_STATE_TRACKING=1 RAY_USAGE_STATS_ENABLED=0
# Attempts have left by the time that Ray is told to end; its own drain would only wait once more.
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0
# Ray ends, and the node joins again, if its raylet ends by itself; no port for Ray Client, which nothing here uses.
export RAY_START_HOOK=orchestrator.stack.ray_hook.prepare_start
common=(
  --block --disable-usage-stats --log-color=false --temp-dir="$temporary/r"
  --node-ip-address="$address"
  --num-cpus="${ORCHESTRATOR_NODE_CPUS:-${SLURM_CPUS_PER_TASK:-$(nproc)}}"
  --labels="orchestrator/node=$name${ORCHESTRATOR_NODE_LABELS:+,$ORCHESTRATOR_NODE_LABELS}"
)
# In an allocation without GPUs, Ray would find those of the others.
given=""
[[ -z ${SLURM_JOB_ID:-} || -n ${CUDA_VISIBLE_DEVICES+set} ]] || given=0
gpus="${ORCHESTRATOR_NODE_GPUS:-${SLURM_GPUS_ON_NODE:-$given}}"
[[ -z $gpus ]] || common+=(--num-gpus="$gpus")
# Ray sees the memory of the machine; the kernel ends what uses more than the allocation.
memory_mb="${SLURM_MEM_PER_NODE:-$((${SLURM_MEM_PER_CPU:-0} * ${SLURM_CPUS_ON_NODE:-0}))}"
((memory_mb > 0)) || memory_mb=$((${SLURM_MEM_PER_GPU:-0} * ${SLURM_GPUS_ON_NODE:-0}))
memory="${ORCHESTRATOR_NODE_MEMORY_BYTES:-$((memory_mb * 1048576 * 7 / 10))}"
shared_free=$(df --block-size=1 --output=avail /dev/shm 2>/dev/null | tail -n 1 || echo 0)
store=$((memory_mb * 1048576 * 2 / 10))
store="${ORCHESTRATOR_OBJECT_STORE_BYTES:-$((store < shared_free ? store : shared_free * 9 / 10))}"
((memory == 0)) || common+=(--memory="$memory")
((store == 0)) || common+=(--object-store-memory="$store")

ray_pid="" serve_pid="" watcher_pid="" told="" has_joined="" claimed=""

say() { echo "$(date -Is) $role $name at $address: $*"; }
head_address() { if [[ -n ${ORCHESTRATOR_HEAD:-} ]]; then echo "$ORCHESTRATOR_HEAD"; else cat "$shared/address" 2>/dev/null; fi; }
is_running() { [[ -n $1 ]] && kill -0 "$1" 2>/dev/null; }
is_over() { [[ $allocation == member && -n $shared && -e $shared/ended ]]; }
answers() { timeout 20 ray health-check --address "$1" >/dev/null 2>&1 9>&-; }

# `wait` comes back at every signal; this one comes back when the process has ended, with its status.
wait_for() {
  local status=0
  while true; do
    wait "$1" && status=0 || status=$?
    is_running "$1" || return "$status"
  done
}

end_ray() {
  if is_running "$ray_pid"; then
    kill -TERM "$ray_pid" || true
    wait_for "$ray_pid" || true
  fi
}
trap 'end_ray; [[ -z $claimed ]] || rm -rf "$temporary"; [[ -z $watcher_pid ]] || kill "$watcher_pid" 2>/dev/null || true' EXIT

# Ray opens its folder to all users of the machine, so it is inside one that only this user can enter. Its name can be guessed: never
# one that somebody else has made. It is locked, because another start of this script would delete what is in it. Processes
# that may outlive this one do not inherit the lock (9>&-): after a crash the next start has it.
claim_folder() {
  claimed=""
  mkdir -p "$(dirname "$temporary")"
  [[ -e $temporary || -L $temporary ]] || mkdir -m 700 "$temporary" || return
  [[ -n $(find "$temporary" -maxdepth 0 -type d -uid "$UID" ! -perm /077) ]] || {
    say "error: $temporary belongs to another user, is a link, or is open to other users (it needs mode 0700); delete it, or set ORCHESTRATOR_RAY_TMP"
    return 1
  }
  exec 9>"$temporary/lock"
  local found=0
  flock --nonblock 9 || found=$?
  ((found < 2)) || { # 1: somebody has the lock
    say "error: the file system of $temporary has no locks: set ORCHESTRATOR_RAY_TMP to a directory on a local disk"
    return 1
  }
  ((found == 0)) && [[ $temporary/lock -ef /dev/fd/9 ]] || {
    say "error: a $role of this cluster runs on this machine already, in $temporary: end it first. A machine has one," \
      "with all CPUs and GPUs that it offers to the cluster"
    return 1
  }
  claimed=yes
  rm -rf "$temporary/r" # of a start that has ended
}

serve_store() {
  claim_folder || exit 2
  [[ -z $shared ]] || rm -f "$shared/ended"
  ray start --head --port="$port" --dashboard-host=127.0.0.1 "${common[@]}" 9>&- &
  ray_pid=$!
  local deadline=$((SECONDS + start_s))
  until answers "$address:$port"; do
    [[ -z $told ]] || return 0
    is_running "$ray_pid" || { say "error: Ray did not start, see above"; return 1; }
    ((SECONDS < deadline)) || { say "error: Ray does not answer at $address:$port after $start_s s"; return 1; }
    sleep 1 9>&-
  done
  export RAY_ADDRESS=$address:$port
  python3 -m orchestrator.cli serve ${ORCHESTRATOR_IDLE_S:+--until-idle "$ORCHESTRATOR_IDLE_S"} --grace "$grace_s" 9>&- &
  serve_pid=$!
  [[ -z $told ]] || kill -TERM "$serve_pid"
  if [[ -n $shared ]]; then
    # Renamed into place: nobody reads half an address.
    printf '%s' "$RAY_ADDRESS" >"$shared/address.$name"
    mv "$shared/address.$name" "$shared/address"
  fi
  # A head that dies must not leave the allocation waiting for it.
  while is_running "$serve_pid"; do
    is_running "$ray_pid" || { say "error: Ray's head has died"; kill -KILL "$serve_pid"; return 1; }
    sleep 1 9>&- &
    wait $! || true
  done
  local status=0
  wait_for "$serve_pid" || status=$?
  [[ -z $shared ]] || rm -f "$shared/address"
  case $status in
    0)
      say "no sweep is unfinished"
      # Members of other allocations end as well. A head that fails or is preempted comes back, and they wait for it.
      [[ -n $told || -z $shared ]] || touch "$shared/ended"
      ;;
    130 | 101) say "served until it was told to end ($status)" ;;
    *) return "$status" ;;
  esac
}

join_cluster() {
  local deadline=$((SECONDS + join_s)) head=""
  until head=$(head_address) && [[ -n $head ]] && answers "$head"; do
    [[ -z $told ]] || return 0
    [[ -z $has_joined ]] || ! is_over || return 0
    ((SECONDS < deadline)) || {
      # Not before: a head that is only starting has yet to take away what the former one left.
      ! is_over || { say "the head has ended: no sweep is unfinished"; return 0; }
      say "error: no head at '$head' within $join_s s"
      return 1
    }
    sleep 2 9>&-
  done
  export RAY_ADDRESS=$head
  claim_folder || exit 2
  ray start --address="$head" "${common[@]}" 9>&- &
  ray_pid=$! has_joined=yes
  [[ -z $told ]] || leave
  local status=0
  wait_for "$ray_pid" || status=$?
  [[ -n $told ]] && return 0
  # Members in the head's allocation end with it: it is queued again as a whole. All others wait for it to come back.
  [[ $allocation != head ]] || answers "$head" || return 0
  ! is_over || { say "the head has ended: no sweep is unfinished"; return 0; }
  say "left the cluster (status $status)"
  return "$ENDED"
}

leave() {
  # Attempts here are asked for a checkpoint and start elsewhere; if the head goes with us, it has asked all of them.
  timeout "$grace_s" python3 -m orchestrator.cluster.leave --deadline "$grace_s" \
    --label "orchestrator/node=$name" --reason "the node is taken back" 9>&- ||
    say "left without waiting for the attempts here"
  ! is_running "$ray_pid" || kill -TERM "$ray_pid"
}

on_notice() {
  [[ -z $told ]] || return 0
  told=yes
  say "told to end"
  if is_running "$serve_pid"; then kill -TERM "$serve_pid"; elif [[ -n ${RAY_ADDRESS:-} ]]; then leave; fi
}
main() {
  trap on_notice TERM
  if [[ -n ${ORCHESTRATOR_NOTICE_FILE:-} ]]; then
    (
      trap - TERM EXIT
      while [[ ! -e $ORCHESTRATOR_NOTICE_FILE ]]; do sleep 1; done
      kill -TERM "$$"
    ) 9>&- &
    watcher_pid=$!
  fi

  if [[ $role == head ]]; then work=serve_store; else work=join_cluster; fi
  tries=3
  while true; do
    status=0 began=$SECONDS
    "$work" || status=$?
    [[ $status != 0 && -z $told ]] || break
    # A node that was up for a while has used up no try: links fail and come back.
    if ((SECONDS - began > start_s)); then tries=3; else tries=$((tries - 1)); fi
    say "ended with status $status; tries left: $tries"
    ((tries > 0)) || break
    end_ray
  done
  return "$status"
}

# On one line with its end: the script may be replaced while it runs.
main; exit
