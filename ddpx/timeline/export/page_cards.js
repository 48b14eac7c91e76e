// A card for each rank: the phase of its reducer at a time, and each param in its bucket.
"use strict";

// Makes an element. Children that are texts never become markup, since scripts choose names of params.
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const STATE_TEXTS = {
  "empty": "empty",
  "filling": "fills",
  "queued": "full, queued",
  "held up": "waits for others",
  "in flight": "in flight",
  "averaged": "averaged",
  "written back": "written back",
  "stays": "not communicated",
};

const COUNT_TEXTS = {
  arrived: "gradients arrived",
  flying: "buckets in flight",
  averaged: "averaged",
  back: "written back",
};

class Card {
  constructor(step, rank, host) {
    this.step = step;
    this.rankStep = step.ranks.get(rank);
    this.numShown = 0; // arrivals whose cells are marked
    this.activity = element("span", {class: "activity"});
    this.phases = new Map(Object.entries(PHASES).map(
      ([phase, {words}]) => [phase, element("li", {}, words)]));
    this.meaning = element("p", {class: "meaning"});
    this.counts = new Map(["arrived", "flying", "averaged", "back"].map((name) => [name, element("dd")]));
    this.cells = new Map();
    this.buckets = step.layout.map((layout, index) => this.makeBucket(layout, index));
    const title = element("h3", {}, `rank ${rank} `, element("small", {}, host), this.activity);
    this.element = element("article", {class: "card", "data-rank": rank, "aria-label": `rank ${rank}`},
      title,
      element("ol", {class: "phases", "aria-label": "Phases of the reducer"}, ...this.phases.values()),
      this.meaning,
      element("dl", {class: "counts"}, ...[...this.counts].map(
        ([name, count]) => element("div", {}, count, element("dt", {}, COUNT_TEXTS[name])))),
      element("ul", {class: "buckets"}, ...this.buckets.map((bucket) => bucket.element)));
  }

  makeBucket({params, size}, index) {
    const cells = element("span", {class: "cells", "aria-hidden": "true"});
    for (const param of params) {
      const cell = element("i", {"data-param": param, "data-bucket": index});
      this.cells.set(param, cell);
      cells.append(cell);
    }
    const bar = element("span", {class: "fill"});
    const text = element("span", {class: "state"});
    const made = element("li", {class: "bucket", "data-bucket": index},
      element("span", {class: "name"}, `bucket ${index}`, element("small", {}, ` ${size}`)),
      cells, text, element("span", {class: "flight", "aria-hidden": "true"}, bar));
    return {element: made, bar, text, shown: ""};
  }

  // Called for every frame, so this method changes only the parts that differ.
  moveTo(t) {
    const arrived = numArrived(this.rankStep, t);
    for (; this.numShown < arrived; this.numShown++) this.cellOf(this.numShown)?.classList.add("here");
    while (this.numShown > arrived) this.cellOf(--this.numShown)?.classList.remove("here");
    const counts = {arrived, flying: 0, averaged: 0, back: 0};
    this.buckets.forEach((bucket, index) => {
      const {state, arrived: count, progress} = bucketAt(this.step, this.rankStep, index, t);
      counts.flying += inFlight(state);
      counts.averaged += state === "averaged";
      counts.back += state === "written back";
      const shown = state === "filling"
        ? `${STATE_TEXTS[state]}, ${count} of ${this.step.layout[index].params.length}`
        : STATE_TEXTS[state];
      if (bucket.shown !== shown + state) {
        bucket.shown = shown + state;
        bucket.element.dataset.state = state;
        bucket.text.textContent = shown;
      }
      bucket.bar.style.transform = `scaleX(${progress})`;
    });
    this.showPhase(phaseAt(this.rankStep, t));
    this.activity.textContent = activityAt(this.rankStep, t);
    for (const [name, count] of this.counts) {
      const total = name === "arrived" ? this.rankStep.arrivals.length : this.buckets.length;
      count.textContent = `${counts[name]} / ${total}`;
      this.element.dataset[name] = counts[name];
    }
  }

  showPhase(phase) {
    if (this.element.dataset.phase === phase) return;
    this.element.dataset.phase = phase;
    for (const [name, item] of this.phases) {
      if (name === phase) item.setAttribute("aria-current", "step");
      else item.removeAttribute("aria-current");
      item.hidden = Boolean(PHASES[name].manual) && name !== phase;
    }
    this.meaning.textContent = PHASES[phase].meaning;
  }

  cellOf(arrival) {
    return this.cells.get(this.rankStep.arrivals[arrival].param);
  }

  tipOf(recording, cell) {
    const param = Number(cell.dataset.param);
    const {params, size} = this.step.layout[Number(cell.dataset.bucket)];
    const at = this.rankStep.arrivedAt.get(param);
    const place = params.length === 1
      ? `alone in bucket ${cell.dataset.bucket}`
      : `one of ${params.length} in bucket ${cell.dataset.bucket} of ${size}`;
    const arrival = at === undefined ? "its gradient never arrives" : `gradient at ${milliseconds(at)} ms`;
    return `${recording.params[param]}: ${recording.paramSizes[param]}, ${place}; ${arrival}`;
  }
}
