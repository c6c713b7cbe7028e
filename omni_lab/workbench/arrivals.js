import { schedule, wallOf } from "./playout.js";

/**
 * An answer as far as it has arrived, in the words of requests.jsonl.
 * @typedef {Object} Answer
 * @property {number[]} text_times_ms when text arrived, since the request was sent
 * @property {number[]} audio_times_ms when each chunk of audio arrived
 * @property {number[]} audio_chunk_samples
 * @property {number} sample_rate
 * @property {?number} e2el_ms its end; null while there is more to come
 */

/** An answer of which nothing has come yet. */
export const nothing = (sampleRate) => ({
  text_times_ms: [], audio_times_ms: [], audio_chunk_samples: [], sample_rate: sampleRate, e2el_ms: null,
});

/**
 * The answer's figures, defined as in `omni_lab.metrics.request`; null where there was nothing to measure.
 * @param {Answer} answer
 */
export function figuresOf({ text_times_ms, audio_times_ms, audio_chunk_samples, sample_rate, e2el_ms }) {
  const { chunks, underruns, durationS } = schedule(audio_times_ms, audio_chunk_samples, sample_rate);
  const spoken = (value) => (chunks.length ? value() : null);
  return {
    ttft_ms: text_times_ms[0] ?? null,
    audio_ttfp_ms: spoken(() => chunks[0].arrivalMs),
    audio_rtf: spoken(() => chunks.at(-1).arrivalMs / 1000 / durationS),
    e2el_ms,
    audio_duration_s: spoken(() => durationS),
    audio_underrun_s: spoken(() => underruns.reduce((sum, { startMs, stopMs }) => sum + stopMs - startMs, 0) / 1000),
  };
}

/** How the figures are shown: name, label, what it means, digits, unit. */
const FIGURES = [
  ["ttft_ms", "first token", "TTFT: from sending to the first text", 0, "ms"],
  ["audio_ttfp_ms", "first audio", "TTFP: from sending to the first chunk of audio", 0, "ms"],
  ["audio_rtf", "RTF", "real-time factor: time to the last chunk over the length of the speech", 3, ""],
  ["e2el_ms", "end", "E2EL: from sending to the end of the answer", 0, "ms"],
  ["audio_duration_s", "speech", "length of the speech", 2, "s"],
  ["audio_underrun_s", "underrun", "silence between chunks, for a player that starts at the first one", 2, "s"],
];

const HEIGHT = 230, LEFT = 44, RIGHT = 26, TOP = 34, BOTTOM = 40;

/** Ends of the time axis, ms: it grows in steps, so that the picture does not creep. */
const SPANS = [500, 1000, 2000, 3000, 4000, 6000, 8000, 12000, 16000, 24000, 32000, 48000];

const STEPS = [1, 2, 5].flatMap((digit) => [digit * 100, digit * 1000, digit * 10000]).sort((a, b) => a - b);

/** The picture of an answer that arrives: its chunks, the listener's buffer and its underruns on one time axis. */
export class Arrivals {
  #answer = nothing(1);
  #plan = schedule([], [], 1);
  #box;
  #head = null;
  #observer;

  /** Draws into an element, with the legend and the figures below the axes. */
  constructor(box) {
    this.#box = box;
    box.classList.add("arrivals");
    box.innerHTML = `
      <svg role="img" height="${HEIGHT}"></svg>
      <ul aria-label="legend">
        <li class="buffer">audio that waits to be played</li><li class="chunk">chunk arrives</li>
        <li class="text">text arrives</li><li class="underrun">underrun: nothing to play</li>
        <li class="head">heard now</li>
      </ul>
      <dl>${FIGURES.map(([, label, meaning]) => `<div title="${meaning}"><dt>${label}</dt><dd></dd></div>`).join("")}</dl>`;
    this.#observer = new ResizeObserver(() => this.#draw());
    this.#observer.observe(box);
  }

  /** Shows an answer, or the same one when more of it has come. @param {Answer} answer */
  show(answer) {
    this.#answer = answer;
    this.#plan = schedule(answer.audio_times_ms, answer.audio_chunk_samples, answer.sample_rate);
    const figures = figuresOf(answer);
    const values = this.#box.querySelectorAll("dd");
    FIGURES.forEach(([name, , , digits, unit], at) => {
      values[at].textContent = figures[name] === null ? "–" : `${figures[name].toFixed(digits)} ${unit}`;
    });
    this.#draw();
  }

  /** Marks what is heard now, `positionS` seconds into the speech; null: nothing is. */
  playhead(positionS) {
    this.#head = positionS;
    const line = this.#box.querySelector("svg .head");
    if (line) line.outerHTML = this.#headLine();
  }

  close() {
    this.#observer.disconnect();
  }

  get #width() {
    return Math.max(240, this.#box.clientWidth);
  }

  get #spanMs() {
    const { text_times_ms, e2el_ms } = this.#answer;
    const last = Math.max(1000 * this.#plan.stopS, e2el_ms ?? 0, text_times_ms.at(-1) ?? 0);
    return SPANS.find((span) => last <= span) ?? Math.ceil(last / 30000) * 30000;
  }

  #x(ms) {
    return LEFT + ((this.#width - LEFT - RIGHT) * ms) / this.#spanMs;
  }

  #headLine() {
    if (this.#head === null) return `<path class="head"/>`;
    return `<path class="head" d="M${this.#x(1000 * wallOf(this.#plan.segments, this.#head))} ${TOP}V${HEIGHT - BOTTOM}"/>`;
  }

  #draw() {
    const { chunks, underruns, buffer } = this.#plan;
    const { text_times_ms: texts, e2el_ms: endMs } = this.#answer;
    const floor = HEIGHT - BOTTOM, width = this.#width, span = this.#spanMs, x = (ms) => this.#x(ms);
    const most = Math.max(0.5, ...buffer.levelS), high = Math.ceil(most * 2) / 2;
    const y = (seconds) => floor - ((floor - TOP) * seconds) / high;
    const step = STEPS.find((ms) => (ms / span) * (width - LEFT - RIGHT) >= 64) ?? 60000;
    const times = Array.from({ length: Math.floor(span / step) + 1 }, (_, at) => at * step);
    const line = buffer.timesMs.map((ms, at) => `${x(ms).toFixed(1)} ${y(buffer.levelS[at]).toFixed(1)}`).join("L");
    const svg = this.#box.querySelector("svg");
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    svg.setAttribute("aria-label", this.#inWords());
    svg.innerHTML = [
      `<text x="${LEFT}" y="12">Playback buffer, s of audio</text>`,
      ...[0, high / 2, high].map((s) => `<path class="grid" d="M${LEFT} ${y(s)}H${width - RIGHT}"/>
        <text class="tick" x="${LEFT - 6}" y="${y(s) + 4}" text-anchor="end">${s}</text>`),
      ...times.map((ms) => `<path class="grid" d="M${x(ms)} ${floor}v5"/>
        <text class="tick" x="${x(ms)}" y="${floor + 18}" text-anchor="middle">${ms.toLocaleString("en")}</text>`),
      `<text class="tick" x="${width - RIGHT}" y="${HEIGHT - 6}" text-anchor="end">ms since the request was sent</text>`,
      ...underruns.map(({ startMs, stopMs }) => `<rect class="underrun" x="${x(startMs)}" y="${TOP}"
        width="${x(stopMs) - x(startMs)}" height="${floor - TOP}">
        <title>silent for ${(stopMs - startMs).toFixed(0)} ms</title></rect>`),
      line && `<path class="buffer" d="M${line}"/>`,
      `<path class="text" d="${texts.map((ms) => `M${x(ms)} ${TOP - 8}v6`).join("")}"/>`,
      ...chunks.map(({ index, arrivalMs, samples }) => `<path class="chunk" d="M${x(arrivalMs)} ${floor - 7}l5 9h-10z">
        <title>chunk ${index + 1} at ${arrivalMs.toFixed(0)} ms: ${samples / this.#answer.sample_rate} s</title></path>`),
      endMs === null ? "" : `<path class="end" d="M${x(endMs)} ${TOP}V${floor}"><title>the answer ends</title></path>`,
      this.#headLine(),
    ].join("");
  }

  #inWords() {
    const { audio_duration_s: spoken, audio_underrun_s: silent } = figuresOf(this.#answer);
    if (spoken === null) return "no audio has arrived";
    const how = silent > 0 ? `with ${silent.toFixed(2)} s of underrun` : "without an underrun";
    return `${spoken.toFixed(2)} s of audio in ${this.#plan.chunks.length} chunks, ${how}`;
  }
}
