// What is true at a time of a step. Times are µs since the step began; what happens at t has
// happened at t.
"use strict";

// In the order in which a step goes through them. Those of manual finalization are shown only while
// they last. The words are those of errors
// (csrc/reducer/phase.cpp); the meanings are those of csrc/reducer/phase.h.
const PHASES = {
  idle: {
    words: "outside backward",
    meaning: "Between synchronized backwards: forward, optimizer, or nothing at all.",
  },
  rebuilding: {
    words: "rebuilding buckets",
    meaning: "Ranks agree on new buckets, in the order in which gradients arrive, and allocate them.",
  },
  collecting: {
    words: "backward",
    meaning: "Backward is running: gradients arrive and fill buckets, full buckets leave.",
  },
  finalizing: {
    words: "end of backward",
    meaning: "Backward has ended: waits for all-reduces and writes the averages back.",
  },
  failed: {
    words: "recovery of a failed step",
    meaning: "The step broke off. Its buffers may still be in use, so fresh ones replace them.",
  },
  ready: {
    manual: true,
    words: "end of backward, before finalize_backward()",
    meaning: "Backward has ended, all buckets have left: the script has not called finalize_backward().",
  },
  finalized: {
    manual: true,
    words: "backward, after finalize_backward()",
    meaning: "finalize_backward() was called within a backward, which still runs.",
  },
};

// A step, from its compact form (ddpx/timeline/page.py): adds times of arrival, and when
// each bucket was in flight on all ranks.
function decodeStep(recording, index) {
  const raw = recording.steps[index];
  const layout = recording.layouts[raw.layout].map(([params, bytes]) => ({params, bytes}));
  const ranks = new Map();
  for (const [rank, rawRank] of Object.entries(raw.ranks)) {
    ranks.set(Number(rank), decodeRank(rawRank, recording.orders[rawRank.order]));
  }
  const allBegun = layout.map((_, bucket) => Math.max(
    ...[...ranks.values()].map((rankStep) => rankStep.buckets[bucket]?.begins ?? -1)));
  return {...raw, layout, ranks, allBegun};
}

function decodeRank(raw, order) {
  let at = 0;
  const arrivals = raw.arrivals.map((delta, i) => ({param: order[i], at: (at += delta)}));
  const buckets = raw.buckets.map((times) => times && {
    ready: times[0], launched: times[1], completed: times[2],
    wait: [times[3], times[4]], writtenBack: times[5],
    begins: times[6] ?? times[1], // later than the launch if reductions take turns
  });
  const arrivedAt = new Map(arrivals.map((arrival) => [arrival.param, arrival.at]));
  return {...raw, arrivals, arrivedAt, buckets};
}

function phaseAt(rankStep, t) {
  const found = rankStep.phases.find(([, begin, end]) => begin <= t && t < end);
  return found ? found[0] : "idle";
}

// How many items `holds` for, if it holds for the first ones and no others.
function countWhile(items, holds) {
  let low = 0;
  let high = items.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (holds(items[middle])) low = middle + 1;
    else high = middle;
  }
  return low;
}

function numArrived(rankStep, t) {
  return countWhile(rankStep.arrivals, (arrival) => arrival.at <= t);
}

function activityAt(rankStep, t) {
  const within = ([begin, end]) => begin <= t && t < end;
  if (rankStep.forwards.some(within)) return "forward";
  if (rankStep.localBackwards.some(within)) return "backward in no_sync()";
  if (within(rankStep.backward)) return "backward";
  for (const [index, bucket] of rankStep.buckets.entries()) {
    if (!bucket) continue;
    if (within(bucket.wait)) return `waits for bucket ${index}`;
    if (within([bucket.wait[1], bucket.writtenBack])) return `writes bucket ${index} back`;
  }
  if (t >= rankStep.end) return "step over";
  if (t >= rankStep.backward[1]) return "end of backward";
  return rankStep.forwards.some(([, end]) => end <= t) ? "between forward and backward" : "not begun";
}

// {state, arrived, progress}; progress is that of the time in flight, from 0 to 1.
function bucketAt(step, rankStep, index, t) {
  const {params} = step.layout[index];
  const bucket = rankStep.buckets[index];
  let arrived = 0;
  for (const param of params) if (rankStep.arrivedAt.get(param) <= t) arrived++;
  if (!bucket) return {state: "stays", arrived, progress: 0};
  const length = bucket.completed - bucket.begins;
  const progress = t < bucket.begins ? 0
    : length > 0 ? Math.min((t - bucket.begins) / length, 1) : 1;
  let state = arrived > 0 ? "filling" : "empty";
  if (t >= bucket.ready) state = "queued";
  if (t >= bucket.begins) state = t < step.allBegun[index] ? "held up" : "in flight";
  if (t >= bucket.completed) state = "averaged";
  if (t >= bucket.writtenBack) state = "written back";
  return {state, arrived, progress};
}

// When a bucket that is communicated is in each state, for the bars.
function bucketSpans(step, rankStep, index) {
  const bucket = rankStep.buckets[index];
  const arrivals = step.layout[index].params.map((param) => rankStep.arrivedAt.get(param) ?? Infinity);
  const moves = Math.min(step.allBegun[index], bucket.completed); // clocks have errors
  return {
    "filling": [Math.min(bucket.ready, ...arrivals), bucket.ready],
    "queued": [bucket.ready, bucket.begins],
    "held-up": [bucket.begins, moves],
    "moving": [moves, bucket.completed],
    "averaged": [bucket.completed, bucket.wait[1]],
    "written": [bucket.wait[1], bucket.writtenBack],
    "wait": bucket.wait,
  };
}

function inFlight(state) {
  return state === "held up" || state === "in flight";
}

// What happens in a step on these ranks, in order of time.
function eventsOf(step, ranks) {
  const events = [];
  for (const rank of ranks) {
    const rankStep = step.ranks.get(rank);
    const add = (at, kind, index) => events.push({at, rank, kind, index});
    for (const [begin, end] of rankStep.forwards) {
      add(begin, "forward begins");
      add(end, "forward ends");
    }
    for (const [begin, end] of rankStep.localBackwards) {
      add(begin, "backward in no_sync() begins");
      add(end, "backward in no_sync() ends");
    }
    add(rankStep.backward[0], "backward begins");
    for (const {param, at} of rankStep.arrivals) add(at, "gradient", param);
    rankStep.buckets.forEach((bucket, index) => {
      if (!bucket) return;
      add(bucket.ready, "is full", index);
      add(bucket.launched, "is launched", index);
      add(bucket.completed, "is averaged", index);
      add(bucket.writtenBack, "is written back", index);
    });
    add(rankStep.backward[1], "backward ends");
    for (const [phase, begin] of rankStep.phases) add(begin, `phase ${PHASES[phase].words}`);
    add(rankStep.end, "the step is over");
  }
  // Sorting is stable: at one time, events of a rank stay in the order in which they are added.
  return events.sort((a, b) => a.at - b.at || a.rank - b.rank);
}

function eventText(recording, event) {
  if (event.kind === "gradient") return `gradient of ${recording.params[event.index]} arrives`;
  return event.index === undefined ? event.kind : `bucket ${event.index} ${event.kind}`;
}

function milliseconds(us, digits = 3) {
  return (us / 1000).toFixed(digits);
}

function sizeText(bytes) {
  if (bytes === 0) return "sparse";
  if (bytes >= 1 << 20) return `${(bytes / (1 << 20)).toFixed(1)} MiB`;
  return bytes >= 1 << 10 ? `${(bytes / (1 << 10)).toFixed(1)} KiB` : `${bytes} B`;
}
