"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const runs = JSON.parse(document.getElementById("data").textContent);
  const W = 420, H = 240, LEFT = 52, RIGHT = 10, TOP = 10, BOTTOM = 24;

  const node = (name, attributes, parent) => {
    const made = document.createElementNS(SVG, name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (parent) parent.append(made);
    return made;
  };
  const show = (value) => value === null || value === undefined ? "no value" : Number(value).toPrecision(5).replace(/\.?0+($|e)/, "$1");

  // Not Math.min(...values): thousands of arguments are more than a call may have.
  const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity), most = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);

  // 1, 2 or 5 times a power of ten, about `count` of them.
  const ticks = (low, high, count) => {
    const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
    const step = power * (raw / power >= 5 ? 5 : raw / power >= 2 ? 2 : 1);
    const found = [];
    for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
    return found;
  };

  class Chart {
    constructor(figure) {
      this.figure = figure;
      this.run = runs[figure.dataset.run];
      this.training = this.run[figure.dataset.of || "trainings"][figure.dataset.training];
      this.svg = node("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", tabindex: 0 });
      this.output = document.createElement("output");
      figure.append(this.svg, this.output);
      this.select(figure.dataset.metric);
      const choice = figure.querySelector("select");
      if (choice) choice.addEventListener("change", () => this.select(choice.value));
      this.svg.addEventListener("pointermove", (event) => this.move(event));
      this.svg.addEventListener("pointerleave", () => { if (!this.drag) this.at(null); });
      this.svg.addEventListener("pointerdown", (event) => { this.drag = this.value(event); this.svg.setPointerCapture(event.pointerId); });
      this.svg.addEventListener("pointerup", (event) => this.drop(event));
      this.svg.addEventListener("dblclick", () => this.zoom(null));
      this.svg.addEventListener("keydown", (event) => this.key(event));
    }

    select(metric) {
      this.metric = metric;
      const line = (values) => this.training.steps.map((step, i) => [step, values[i]]).filter((p) => p[1] !== null && p[1] !== undefined);
      this.points = line(this.training.metrics[metric]);
      this.beside = this.training.beside ? line(this.training.beside.values) : [];
      const bands = this.training.bands || [this.training.band];
      this.band = bands.find((band) => band && band.metric === metric) || null;
      this.cursor = null;
      this.zoom(null);
    }

    zoom(range) { this.range = range && range[1] > range[0] ? range : null; this.draw(); }

    draw() {
      const steps = [...this.points, ...this.beside].map((p) => p[0]);
      if (this.band && !this.range) steps.push(...this.band.steps);
      let [left, right] = this.range || [least(steps), most(steps)];
      if (!isFinite(left)) { this.svg.replaceChildren(); this.output.textContent = "no values"; return; }
      if (left === right) { left -= 0.5; right += 0.5; }
      const inside = (step) => step >= left && step <= right;
      const edges = this.band ? this.band.steps.map((s, i) => [s, this.band.low[i], this.band.high[i]]).filter((p) => inside(p[0]) && p[1] !== null && p[2] !== null) : [];
      const beside = this.beside.filter((p) => inside(p[0]));
      const values = [...this.points.filter((p) => inside(p[0])), ...beside].map((p) => p[1]);
      edges.forEach((p) => values.push(p[1], p[2]));
      // Upwards by powers of ten where the chart asks for it; what is not above 0 stands on the ground below them all.
      const above = this.training.log ? values.filter((value) => value > 0) : [];
      const ground = above.length ? Math.floor(Math.log10(least(above))) - 1 : null;
      const up = ground === null ? (value) => value : (value) => value > 0 ? Math.log10(value) : ground;
      let low = least(values.map(up)), high = most(values.map(up));
      if (!isFinite(low)) { low = 0; high = 1; }
      const pad = (high - low) * 0.06 || (ground === null ? Math.abs(high) * 0.1 : 0) || 1;
      low -= pad; high += pad;
      this.x = (step) => LEFT + (step - left) / (right - left) * (W - LEFT - RIGHT);
      const height = (at) => H - BOTTOM - (at - low) / (high - low) * (H - TOP - BOTTOM);
      this.y = (value) => height(up(value));
      this.step = (x) => left + (x - LEFT) / (W - LEFT - RIGHT) * (right - left);
      this.shown = this.points.filter((p) => inside(p[0]));
      this.svg.replaceChildren();
      this.svg.setAttribute("aria-label", `${this.metric}, ${this.points.length} steps, from ${show(this.points[0] && this.points[0][1])} to ${show(this.points.length && this.points[this.points.length - 1][1])}`);
      for (const at of ticks(low, high, 4)) {
        node("line", { class: "grid", x1: LEFT, x2: W - RIGHT, y1: height(at), y2: height(at) }, this.svg);
        node("text", { x: LEFT - 6, y: height(at) + 4, "text-anchor": "end" }, this.svg).textContent = ground === null ? show(at) : at <= ground ? "0" : (10 ** at).toExponential(Number.isInteger(at) ? 0 : 1);
      }
      for (const at of ticks(left, right, 5)) if (Number.isInteger(at))
        node("text", { x: this.x(at), y: H - 6, "text-anchor": "middle" }, this.svg).textContent = at;
      const path = (points) => points.map((p) => `${this.x(p[0])},${this.y(p[1])}`).join(" ");
      if (this.band) {
        const corners = [...edges.map((p) => [p[0], p[2]]), ...[...edges].reverse().map((p) => [p[0], p[1]])];
        node("polygon", { class: "band", points: path(corners) }, this.svg);
      }
      if (beside.length) node("polyline", { class: "beside", points: path(beside) }, this.svg);
      node("polyline", { class: "line", points: path(this.shown) }, this.svg);
      if (this.shown.length === 1) node("circle", { class: "dot", cx: this.x(this.shown[0][0]), cy: this.y(this.shown[0][1]), r: 3 }, this.svg);
      this.over = node("g", {}, this.svg);
      this.at(this.cursor);
    }

    at(index) {
      this.cursor = index === null || !this.shown.length ? null : Math.max(0, Math.min(this.shown.length - 1, index));
      this.over.replaceChildren();
      if (this.cursor === null) { this.output.textContent = this.range ? "zoomed" : ""; return; }
      const [step, value] = this.shown[this.cursor];
      node("line", { class: "cursor", x1: this.x(step), x2: this.x(step), y1: TOP, y2: H - BOTTOM }, this.over);
      node("circle", { class: "dot", cx: this.x(step), cy: this.y(value), r: 4 }, this.over);
      let text = `step ${step}: ${show(value)}`;
      const place = this.band ? this.band.steps.indexOf(step) : -1;
      if (place >= 0) text += ` (${this.band.word || "baseline"} ${show(this.band.low[place])} … ${show(this.band.high[place])})`;
      const other = this.beside.find((p) => p[0] === step);
      if (other) text += `, ${this.training.beside.name} ${show(other[1])}`;
      this.output.textContent = text;
    }

    value(event) {
      const box = this.svg.getBoundingClientRect();
      return this.step((event.clientX - box.left) / box.width * W);
    }

    move(event) {
      const step = this.value(event);
      let best = 0;
      this.shown.forEach((p, i) => { if (Math.abs(p[0] - step) < Math.abs(this.shown[best][0] - step)) best = i; });
      this.at(best);
      if (this.drag !== undefined) {
        const ends = [this.drag, step].sort((a, b) => a - b).map(this.x);
        node("rect", { class: "zoom", x: ends[0], width: ends[1] - ends[0], y: TOP, height: H - TOP - BOTTOM }, this.over);
      }
    }

    drop(event) {
      if (this.drag === undefined) return;
      const ends = [this.drag, this.value(event)].sort((a, b) => a - b);
      this.drag = undefined;
      if (Math.abs(this.x(ends[1]) - this.x(ends[0])) > 8) this.zoom(ends); else this.draw();
    }

    key(event) {
      const middle = this.cursor === null ? null : this.shown[this.cursor][0];
      const span = this.range ? this.range[1] - this.range[0] : this.points.length ? this.points[this.points.length - 1][0] - this.points[0][0] : 0;
      const act = {
        ArrowRight: () => this.at(this.cursor === null ? 0 : this.cursor + 1),
        ArrowLeft: () => this.at(this.cursor === null ? this.shown.length - 1 : this.cursor - 1),
        Home: () => this.at(0),
        End: () => this.at(this.shown.length - 1),
        "+": () => this.zoom([(middle ?? this.points[0][0] + span / 2) - span / 4, (middle ?? this.points[0][0] + span / 2) + span / 4]),
        "-": () => this.zoom(null),
        Escape: () => this.zoom(null),
      }[event.key];
      if (act && this.points.length) { act(); event.preventDefault(); }
    }
  }

  document.getElementById("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
  // Charts are drawn when they come near the screen: a page of hundreds opens at once.
  const near = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) { near.unobserve(entry.target); new Chart(entry.target); }
  }, { rootMargin: "300px" });
  const figures = document.querySelectorAll(".chart");
  figures.forEach((figure) => near.observe(figure));
  addEventListener("beforeprint", () => figures.forEach((figure) => { if (!figure.querySelector("svg")) { near.unobserve(figure); new Chart(figure); } }));
})();
