// The state of ranks and buckets at a time t, in µs since the step began. An event at t counts as past.
"use strict";

// The phases in the order of a step. A phase of manual finalization is shown only while it lasts.
// Words are from csrc/reducer/phase.cpp, and meanings from csrc/reducer/phase.h.
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

// Decodes a step from its compact form (ddpx/timeline/export/page.py), and adds times of arrival.
function decodeStep(recording, index) {
  const raw = recording.steps[index];
  const layout = recording.layouts[raw.layout].map(([params, size]) => ({params, size}));
  const ranks = new Map();
  for (const [rank, rawRank] of Object.entries(raw.ranks)) {
    ranks.set(Number(rank), decodeRank(rawRank, recording.orders[rawRank.order], recording.times));
  }
  return {...raw, layout, ranks};
}

function decodeRank(raw, order, names) {
  let at = 0;
  const arrivals = raw.arrivals.map((delta, i) => ({param: order[i], at: (at += delta)}));
  // As in ddpx/timeline/export/rows.py: bucket.begins is later than the launch if reductions take turns.
  const buckets = raw.buckets.map((times) => times && Object.fromEntries(names.map((name, i) => [name, times[i]])));
  const arrivedAt = new Map(arrivals.map((arrival) => [arrival.param, arrival.at]));
  return {...raw, arrivals, arrivedAt, buckets};
}

function phaseAt(rankStep, t) {
  const found = rankStep.phases.find(([, begin, end]) => begin <= t && t < end);
  return found ? found[0] : "idle";
}

// The number of leading items for which `holds` is true. It is false for all later items.
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
    if (within([bucket.waits, bucket.waited])) return `waits for bucket ${index}`;
    if (within([bucket.waited, bucket.written])) return `writes bucket ${index} back`;
  }
  if (t >= rankStep.end) return "step over";
  if (t >= rankStep.backward[1]) return "end of backward";
  return rankStep.forwards.some(([, end]) => end <= t) ? "between forward and backward" : "not begun";
}

// Returns {state, arrived, progress}. Progress is the elapsed share of the time in flight, from 0 to 1.
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
  if (t >= bucket.begins) state = t < bucket.moves ? "held up" : "in flight";
  if (t >= bucket.completed) state = "averaged";
  if (t >= bucket.written) state = "written back";
  return {state, arrived, progress};
}

function inFlight(state) {
  return state === "held up" || state === "in flight";
}

// The events of a step on these ranks, in order of time.
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
      add(bucket.written, "is written back", index);
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
