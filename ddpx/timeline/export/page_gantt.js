// The whole step as bars, drawn once for a step, its ranks and the window's width.
"use strict";

const LEGEND = [
  ["not-begun", "not begun"], ["forward", "forward"], ["backward", "backward"], ["gradient", "gradient arrives"],
  ["filling", "bucket fills"], ["queued", "full, queued"],
  ["held-up", "launched, other ranks not yet"], ["moving", "in flight on all ranks"],
  ["written", "written back"], ["exposed", "exposed wait"],
];

// In pixels: the axis; of a rank what is above its buckets, and what is below.
const AXIS = 24;
const HEAD = 33;
const GAP = 13;

class Gantt {
  constructor(box, onTime) {
    this.box = box;
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
    const rows = ranks.map((rank) => this.numRows(step.ranks.get(rank)));
    const numRows = rows.reduce((a, b) => a + b, 0);
    // Half of the window, if rows of that height can be told apart.
    const room = window.innerHeight / 2 - AXIS - ranks.length * (HEAD + GAP);
    this.rowHeight = Math.floor(Math.min(Math.max(room / Math.max(numRows, 1), 5), 15));
    const heights = rows.map((count) => HEAD + count * this.rowHeight + GAP);
    const height = heights.reduce((a, b) => a + b, AXIS);
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
    this.hatch = this.makeHatch();
    this.rows = [];
    this.drawAxis(height);
    let top = AXIS;
    ranks.forEach((rank, i) => {
      this.drawRank(rank, top);
      top += heights[i];
    });
  }

  numRows(rankStep) {
    return rankStep.buckets.some((bucket) => bucket) ? rankStep.buckets.length : 0;
  }

  makeHatch() {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const context = tile.getContext("2d");
    context.strokeStyle = this.color("exposed");
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

  bar(y, height, [begin, end], color) {
    if (end < begin) return;
    this.context.fillStyle = color;
    // What is shorter than a pixel must be seen as well.
    if (end > begin) this.context.fillRect(this.x(begin), y, Math.max(this.x(end) - this.x(begin), 0.8), height);
  }

  drawRank(rank, compute) {
    const rankStep = this.step.ranks.get(rank);
    this.text(`rank ${rank}`, 0, compute + 8, {color: "text", weight: "600"});
    if (this.left > 100) this.label("compute", compute + 8);
    this.bar(compute + 1, 13, [0, rankStep.figures.notBegun], this.color("not-begun"));
    for (const forward of rankStep.forwards) this.bar(compute + 1, 13, forward, this.color("forward"));
    for (const backward of [...rankStep.localBackwards, rankStep.backward]) {
      this.bar(compute + 1, 13, backward, this.color("backward"));
    }
    this.rows.push({top: compute, bottom: compute + 16, text: (t) => `rank ${rank}: ${activityAt(rankStep, t)}`});
    const gradients = compute + 17;
    this.label("gradients", gradients + 7);
    this.context.fillStyle = this.color("gradient");
    this.context.globalAlpha = rankStep.arrivals.length > this.width / 4 ? 0.3 : 1; // many overlap
    for (const {at} of rankStep.arrivals) this.context.fillRect(this.x(at) - 0.5, gradients + 1, 1, 12);
    this.context.globalAlpha = 1;
    this.rows.push({top: gradients, bottom: gradients + 15, text: (t) => this.nearestGradient(rank, rankStep, t)});
    for (let index = 0; index < this.numRows(rankStep); index++) {
      this.drawBucket(rank, rankStep, index, compute + HEAD + index * this.rowHeight);
    }
  }

  label(text, y) {
    this.text(text, this.left - 8, y, {align: "right"});
  }

  nearestGradient(rank, rankStep, t) {
    const after = numArrived(rankStep, t);
    const near = rankStep.arrivals.slice(Math.max(after - 1, 0), after + 1)
      .sort((a, b) => Math.abs(a.at - t) - Math.abs(b.at - t))[0];
    if (!near || Math.abs(this.x(near.at) - this.x(t)) > 4) return undefined;
    return `rank ${rank}: gradient of ${this.paramName(near.param)} arrives at ${milliseconds(near.at)} ms`;
  }

  drawBucket(rank, rankStep, index, top) {
    const bucket = rankStep.buckets[index];
    const {params, bytes} = this.step.layout[index];
    const every = Math.ceil(11 / this.rowHeight); // a label is higher than low rows
    if ((index + 1) % every === 0) {
      this.label(this.left > 100 ? `bucket ${index}, ${sizeText(bytes)}` : `b. ${index}`, top + this.rowHeight / 2);
    }
    if (!bucket) return;
    const first = Math.min(bucket.ready, ...params.map((param) => rankStep.arrivedAt.get(param) ?? Infinity));
    const moves = Math.min(this.step.allLaunched[index], bucket.completed);
    const height = Math.max(this.rowHeight - (this.rowHeight > 6 ? 3 : 1), 3);
    const bar = (span, name) => this.bar(top + 1, height, span, this.color(name));
    bar([first, bucket.ready], "filling");
    bar([bucket.ready, bucket.launched], "queued");
    bar([bucket.launched, moves], "held-up");
    bar([moves, bucket.completed], "moving");
    this.bar(top + 1, height, [
      Math.max(bucket.wait[0], bucket.launched), Math.min(bucket.wait[1], bucket.completed)], this.hatch);
    bar([bucket.wait[1], bucket.writtenBack], "written");
    this.rows.push({
      top, bottom: top + this.rowHeight,
      text: () => `rank ${rank}, bucket ${index}, ${sizeText(bytes)}, ${params.length} params: ` +
        `full ${milliseconds(bucket.ready)}, launched ${milliseconds(bucket.launched)}, ` +
        `averaged ${milliseconds(bucket.completed)}, written back ${milliseconds(bucket.writtenBack)} ms`,
    });
  }
}
