// The whole step as bars. A change of the step, the ranks or the width of the window draws them again.
"use strict";

// Heights in pixels: the axis, the rows above the buckets of a rank, the gap below them, a folded rank.
// THIN is the least width of a bar.
const AXIS = 24;
const HEAD = 33;
const GAP = 13;
const FOLDED = 20;
const THIN = 2;

class Gantt {
  constructor(box, recording, onTime) {
    this.box = box;
    this.recording = recording;
    this.canvas = box.querySelector("canvas");
    this.cursor = box.querySelector("#cursor");
    this.step = null;
    this.rows = []; // {top, bottom, text(t)}, for tips
    const point = (event) => onTime(this.timeAt(event.clientX));
    this.canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      this.canvas.setPointerCapture(event.pointerId);
      point(event);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (event.buttons & 1) point(event);
    });
  }

  timeAt(clientX) {
    const x = clientX - this.canvas.getBoundingClientRect().left;
    return Math.round((x - this.left) / this.width * this.step.length);
  }

  x(t) {
    return this.left + t / this.step.length * this.width;
  }

  // The tip for a place in the window.
  textAt(clientX, clientY) {
    const y = clientY - this.canvas.getBoundingClientRect().top;
    return this.rows.find((row) => row.top <= y && y < row.bottom)?.text(this.timeAt(clientX));
  }

  moveTo(t) {
    this.cursor.style.transform = `translateX(${this.x(t)}px)`;
  }

  draw(step, ranks) {
    this.step = step;
    const full = this.box.clientWidth;
    this.left = full < 600 ? 64 : 118;
    this.width = full - this.left - 12;
    const rows = ranks.map((rank) => this.groups(step.ranks.get(rank)).length);
    const numRows = rows.reduce((a, b) => a + b, 0);
    const folded = this.foldedRanks(ranks);
    // The bars fill half of the window, within the limits of the height of a row.
    const room = window.innerHeight / 2 - AXIS - ranks.length * (HEAD + GAP);
    this.rowHeight = Math.floor(Math.min(Math.max(room / Math.max(numRows, 1), 5), 15));
    const heights = rows.map((count) => HEAD + count * this.rowHeight + GAP);
    const numLeftOut = step.ranks.size - ranks.length - folded.length;
    const height = heights.reduce((a, b) => a + b, AXIS) + (folded.length + (numLeftOut > 0)) * FOLDED;
    const scale = window.devicePixelRatio || 1;
    this.canvas.width = full * scale;
    this.canvas.height = height * scale;
    this.canvas.style.width = `${full}px`;
    this.canvas.style.height = `${height}px`;
    this.cursor.style.height = `${height}px`;
    this.canvas.setAttribute("aria-label",
      `Bars of step ${step.number} on ${ranks.length === 1 ? "rank" : "ranks"} ${ranks.join(", ")}: ` +
      "forward, backward and every bucket over time. The slider moves through the same times.");
    this.context = this.canvas.getContext("2d");
    this.context.scale(scale, scale);
    this.context.clearRect(0, 0, full, height);
    const style = getComputedStyle(document.documentElement);
    this.color = (name) => style.getPropertyValue(`--${name}`);
    this.hatches = {"held-up": this.makeHatch("on-held-up"), "moving": this.makeHatch("on-moving")};
    this.rows = [];
    this.used = new Set();
    this.drawAxis(height);
    let top = AXIS;
    ranks.forEach((rank, i) => {
      this.drawRank(rank, top);
      top += heights[i];
    });
    for (const rank of folded) {
      this.drawFolded(rank, top);
      top += FOLDED;
    }
    if (numLeftOut > 0) this.label(`and ${numLeftOut} more`, top + 8);
  }

  // The buckets of each row. Buckets without long waits share a row if there are many.
  groups(rankStep) {
    return rankStep.buckets.some((bucket) => bucket) ? this.step.rows : [];
  }

  // The folded ranks with the longest exposed waits.
  foldedRanks(ranks) {
    return this.step.byExposed.filter((rank) => !ranks.includes(rank))
      .slice(0, this.recording.maxFolded).sort((a, b) => a - b);
  }

  makeHatch(name) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const context = tile.getContext("2d");
    context.strokeStyle = this.color(name);
    context.lineWidth = 1.4;
    context.beginPath();
    for (const shift of [-6, 0, 6]) {
      context.moveTo(shift - 1, 7);
      context.lineTo(shift + 7, -1);
    }
    context.stroke();
    return this.context.createPattern(tile, "repeat");
  }

  text(text, x, y, {color = "faint", align = "left", weight = ""} = {}) {
    this.context.fillStyle = this.color(color);
    this.context.font = `${weight} 11px system-ui, sans-serif`;
    this.context.textAlign = align;
    this.context.textBaseline = "middle";
    this.context.fillText(text, x, y);
  }

  drawAxis(height) {
    const length = this.step.length / 1000;
    const rough = length / Math.max(this.width / 90, 1);
    const power = 10 ** Math.floor(Math.log10(rough));
    const every = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
    const digits = Math.max(0, -Math.floor(Math.log10(every)));
    for (let i = 0; i * every <= length; i++) {
      const x = Math.round(this.x(i * every * 1000)) + 0.5;
      this.context.fillStyle = this.color("line");
      this.context.fillRect(x - 0.5, 18, 1, height - 18);
      const label = (i * every).toFixed(digits);
      this.text(i === 0 ? `${label} ms` : label, x, 9, {align: "center"});
    }
  }

  // A bar with the color of a name, or with a pattern.
  bar(y, height, [begin, end], name, pattern = this.color(name)) {
    if (end - begin <= this.recording.negligible * this.step.length) return;
    this.used.add(name);
    this.context.fillStyle = pattern;
    const width = Math.max(this.x(end) - this.x(begin), THIN);
    this.context.fillRect(Math.min(this.x(begin), this.left + this.width - width), y, width, height);
  }

  drawRank(rank, compute) {
    const rankStep = this.step.ranks.get(rank);
    this.text(`rank ${rank}`, 0, compute + 8, {color: "text", weight: "600"});
    if (this.left > 100) this.label("compute", compute + 8);
    this.drawCompute(rankStep, compute + 1, 13);
    this.rows.push({top: compute, bottom: compute + 16, text: (t) => `rank ${rank}: ${activityAt(rankStep, t)}`});
    const gradients = compute + 17;
    this.label("gradients", gradients + 7);
    this.context.fillStyle = this.color("gradient");
    this.context.globalAlpha = rankStep.arrivals.length > this.width / 4 ? 0.3 : 1; // many overlap
    for (const {at} of rankStep.arrivals) this.context.fillRect(this.x(at) - 0.5, gradients + 1, 1, 12);
    this.context.globalAlpha = 1;
    this.rows.push({top: gradients, bottom: gradients + 15, text: (t) => this.nearestGradient(rank, rankStep, t)});
    if (rankStep.arrivals.length > 0) this.used.add("gradient");
    this.groups(rankStep).forEach(([group, label], row) => {
      this.drawGroup(rank, rankStep, group, label, row, compute + HEAD + row * this.rowHeight);
    });
  }

  drawCompute(rankStep, y, height) {
    this.bar(y, height, [0, rankStep.figures.notBegun], "not-begun");
    for (const forward of rankStep.forwards) this.bar(y, height, forward, "forward");
    for (const backward of [...rankStep.localBackwards, rankStep.backward]) this.bar(y, height, backward, "backward");
  }

  // Computation, and below it all buckets in one row.
  drawFolded(rank, top) {
    const rankStep = this.step.ranks.get(rank);
    this.label(`rank ${rank}`, top + 8);
    this.drawCompute(rankStep, top + 1, 8);
    this.drawBuckets(rankStep, [...rankStep.buckets.keys()], top + 10, 7);
    this.rows.push({top, bottom: top + FOLDED, text: (t) => `rank ${rank}: ${activityAt(rankStep, t)}`});
  }

  label(text, y) {
    this.text(text, this.left - 8, y, {align: "right"});
  }

  nearestGradient(rank, rankStep, t) {
    const after = numArrived(rankStep, t);
    const near = rankStep.arrivals.slice(Math.max(after - 1, 0), after + 1)
      .sort((a, b) => Math.abs(a.at - t) - Math.abs(b.at - t))[0];
    if (!near || Math.abs(this.x(near.at) - this.x(t)) > 4) return undefined;
    return `rank ${rank}: gradient of ${this.recording.params[near.param]} arrives at ${milliseconds(near.at)} ms`;
  }

  drawGroup(rank, rankStep, group, label, row, top) {
    const [index] = group;
    const {params} = this.step.layout[index];
    const every = Math.ceil(11 / this.rowHeight); // a label is higher than low rows
    const shown = this.left > 100 ? label : label.replace(/,.*/, "").replace(/buckets?/, "b.");
    if ((row + 1) % every === 0) this.label(shown, top + this.rowHeight / 2);
    this.drawBuckets(rankStep, group, top + 1, Math.max(this.rowHeight - (this.rowHeight > 6 ? 3 : 1), 3));
    const bucket = rankStep.buckets[index];
    if (!bucket) return;
    const text = group.length > 1
      ? `rank ${rank}, ${label}: short waits; each bucket is below, at "At this time"`
      : `rank ${rank}, ${label}, ${params.length} params: ` +
        `full ${milliseconds(bucket.ready)}, launched ${milliseconds(bucket.launched)}, ` +
        `averaged ${milliseconds(bucket.completed)}, written back ${milliseconds(bucket.written)} ms`;
    this.rows.push({top, bottom: top + this.rowHeight, text: () => text});
  }

  // State by state, since a state covers earlier states.
  drawBuckets(rankStep, indices, y, height) {
    const buckets = indices.map((index) => rankStep.buckets[index]).filter((bucket) => bucket);
    const {states, mayBeExposed} = this.recording;
    for (const [name, [from, to]] of Object.entries(states)) {
      for (const bucket of buckets) this.bar(y, height, [bucket[from], bucket[to]], name);
    }
    for (const name of mayBeExposed) {
      const [from, to] = states[name];
      for (const bucket of buckets) {
        const exposed = [Math.max(bucket[from], bucket.waits), Math.min(bucket[to], bucket.waited)];
        this.bar(y, height, exposed, "exposed", this.hatches[name]);
      }
    }
  }
}
