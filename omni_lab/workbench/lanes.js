import { levelAt } from "./playout.js";
import { outline } from "./signal.js";
import { milliseconds } from "./dom.js";

/**
 * The drawing: waveform, chunks, arrivals and playback buffer above one time axis.
 *
 * @typedef {Object} Scene what is drawn
 * @property {[number, number]} view first and last second of the axis that are seen
 * @property {string} axis what the axis counts
 * @property {Float32Array} samples
 * @property {number} sampleRate
 * @property {{low: Float32Array, high: Float32Array}} blocks `peaks(samples)`
 * @property {number} gain by which the waveform is drawn larger
 * @property {import("./playout.js").Segment[]} segments where on the axis the samples lie
 * @property {string} color of the waveform
 * @property {?ReturnType<import("./playout.js").schedule>} plan chunks and buffer; null where they have no meaning
 * @property {boolean} timed whether arrival times were recorded
 * @property {number} chunk index of the chunk that is inspected, -1 for none
 * @property {?[number, number]} region on the axis
 * @property {?string} veil words in place of everything but the axis
 */

const WAVE = { top: 8, bottom: 112 }, STRIP = { top: 118, bottom: 132 }, ARRIVALS = { top: 134, bottom: 176 };
const BUFFER = { top: 190, bottom: 246 }, AXIS_HEIGHT = 26, PAD = 14;

/** Height of the drawing in pixels: lanes without anything to show take no room. */
export function heightOf(scene) {
  return lowestOf(scene) + AXIS_HEIGHT;
}

/** The x of a time on the axis, and the time at an x. */
export function xOf([from, to], width, seconds) {
  return PAD + ((seconds - from) / (to - from)) * (width - 2 * PAD);
}

export function secondsAt([from, to], width, x) {
  return from + ((x - PAD) / (width - 2 * PAD)) * (to - from);
}

/** The chunk whose block or arrival mark is under a point; undefined if there is none. */
export function chunkUnder(scene, width, x, y) {
  if (!scene.plan || scene.veil || y < STRIP.top - 3) return undefined;
  const at = (seconds) => xOf(scene.view, width, seconds);
  if (y <= STRIP.bottom + 3) {
    return scene.plan.chunks.find(({ playMs, startS, stopS }) => {
      const left = at(playMs / 1000);
      return left <= x && x < Math.max(left + 2, at(playMs / 1000 + stopS - startS));
    });
  }
  if (!scene.timed || y > ARRIVALS.bottom + 8) return undefined;
  const near = scene.plan.chunks.filter(({ arrivalMs }) => Math.abs(at(arrivalMs / 1000) - x) <= 6);
  return near.sort((a, b) => Math.abs(at(a.arrivalMs / 1000) - x) - Math.abs(at(b.arrivalMs / 1000) - x))[0];
}

/**
 * Draws a scene. `paint` gives the colour of a role: ink, soft, line, tint, blue, orange, vermilion.
 * @param {HTMLCanvasElement} canvas
 * @param {Scene} scene
 * @param {(role: string) => string} paint
 */
export function draw(canvas, scene, paint) {
  const width = canvas.clientWidth, height = heightOf(scene), density = window.devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * density);
  canvas.height = Math.round(height * density);
  const pen = canvas.getContext("2d");
  pen.scale(density, density);
  pen.font = `11px ${getComputedStyle(canvas).fontFamily}`;
  const at = (seconds) => xOf(scene.view, width, seconds);
  const lane = { pen, paint, at, width, scene, lowest: lowestOf(scene) };
  drawAxis(lane);
  pen.save();
  pen.beginPath();
  pen.rect(PAD, 0, width - 2 * PAD, lane.lowest + 4);
  pen.clip();
  if (scene.veil) drawVeil(lane);
  else {
    drawRegion(lane);
    drawWave(lane);
    drawSilences(lane);
    if (scene.plan) drawChunks(lane);
    if (scene.plan && scene.timed) drawBuffer(lane);
  }
  pen.restore();
}

function lowestOf({ plan, timed, veil }) {
  if (veil || !plan) return WAVE.bottom + 6;
  return timed ? BUFFER.bottom : STRIP.bottom + 6;
}

/** Round steps of the axis, 70 pixels or more apart. */
export function ticks([from, to], width) {
  const rough = ((to - from) * 70) / Math.max(width, 1), ten = 10 ** Math.floor(Math.log10(rough));
  const minute = rough > 10 ? [15, 30, 60, 120, 300, 600].find((step) => step >= rough) : undefined;
  const step = minute ?? ten * ([1, 2, 5].find((factor) => factor * ten >= rough) ?? 10);
  const found = [];
  for (let i = Math.ceil(from / step); i * step <= to; i++) found.push(i * step);
  return { step, found };
}

function drawAxis({ pen, paint, at, width, scene, lowest }) {
  const { step, found } = ticks(scene.view, width - 2 * PAD);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  pen.lineWidth = 1;
  pen.textAlign = "center";
  pen.textBaseline = "top";
  for (const seconds of found) {
    const x = Math.round(at(seconds)) + 0.5;
    pen.strokeStyle = paint("line");
    line(pen, x, 4, x, lowest + 4);
    pen.fillStyle = paint("soft");
    const minutes = `${Math.floor(seconds / 60)}:${String(seconds % 60).padStart(2, "0")}`;
    const label = step >= 15 ? minutes : seconds.toFixed(digits);
    if (x < width - PAD - 8) pen.fillText(label, x, lowest + 8);
  }
  pen.strokeStyle = paint("soft");
  line(pen, PAD, lowest + 0.5, width - PAD, lowest + 0.5);
}

function drawVeil({ pen, paint, width, scene }) {
  pen.fillStyle = paint("tint");
  pen.fillRect(PAD, WAVE.top, width - 2 * PAD, WAVE.bottom - WAVE.top);
  pen.fillStyle = paint("soft");
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  pen.fillText(scene.veil, width / 2, (WAVE.top + WAVE.bottom) / 2);
}

function drawRegion({ pen, paint, at, scene, lowest }) {
  if (!scene.region) return;
  const [from, to] = scene.region.map(at);
  pen.globalAlpha = 0.14;
  pen.fillStyle = paint("blue");
  pen.fillRect(from, 2, to - from, lowest - 2);
  pen.globalAlpha = 0.8;
  pen.strokeStyle = paint("blue");
  for (const x of [from, to]) line(pen, x, 2, x, lowest);
  pen.globalAlpha = 1;
}

/** Before the speech: how long the listener waited. In it: where the player ran dry. */
function drawSilences({ pen, paint, at, scene, lowest }) {
  if (!scene.plan || !scene.timed) return;
  pen.textBaseline = "middle";
  pen.textAlign = "center";
  const middle = (WAVE.top + WAVE.bottom) / 2, { startS, underruns } = scene.plan;
  const left = Math.max(at(0), at(scene.view[0])), right = at(startS);
  const shown = [`first audio after ${milliseconds(1000 * startS)}`, milliseconds(1000 * startS)];
  const words = shown.find((label) => pen.measureText(label).width + 12 < right - left);
  if (words) plate(pen, paint, words, (left + right) / 2, middle, "soft");
  pen.strokeStyle = paint("soft");
  pen.setLineDash([3, 3]);
  line(pen, right, WAVE.top, right, lowest);
  pen.setLineDash([]);
  for (const { startMs, stopMs } of underruns) {
    const from = at(startMs / 1000), span = Math.max(1.5, at(stopMs / 1000) - from);
    pen.globalAlpha = 0.16;
    pen.fillStyle = paint("vermilion");
    pen.fillRect(from, 2, span, lowest - 2);
    pen.globalAlpha = 0.55;
    pen.strokeStyle = paint("vermilion");
    hatch(pen, from, WAVE.top, span, WAVE.bottom - WAVE.top);
    pen.globalAlpha = 1;
    const label = `silent ${milliseconds(stopMs - startMs)}`;
    if (pen.measureText(label).width + 14 < span) plate(pen, paint, label, from + span / 2, middle, "vermilion");
  }
}

function drawWave({ pen, paint, at, scene }) {
  const middle = (WAVE.top + WAVE.bottom) / 2, half = (WAVE.bottom - WAVE.top) / 2;
  pen.fillStyle = paint("line");
  pen.fillRect(at(scene.view[0]), middle, at(scene.view[1]) - at(scene.view[0]), 1);
  pen.fillStyle = scene.color;
  for (const { wallS, startS, stopS } of scene.segments) {
    const from = Math.max(wallS, scene.view[0]), to = Math.min(wallS + stopS - startS, scene.view[1]);
    if (from >= to) continue;
    const first = Math.floor(at(from)), columns = Math.max(1, Math.ceil(at(to)) - first);
    const sample = (seconds) => (startS + seconds - wallS) * scene.sampleRate;
    const { low, high } = outline(scene.samples, scene.blocks, sample(from), sample(to), columns);
    for (let column = 0; column < columns; column++) {
      const top = Math.min(1, high[column] * scene.gain), bottom = Math.max(-1, low[column] * scene.gain);
      pen.fillRect(first + column, middle - top * half, 1, Math.max(1, (top - bottom) * half));
    }
  }
}

/** A block for each chunk under its part of the waveform, and a thread down to the moment at which it arrived. */
function drawChunks({ pen, paint, at, width, scene }) {
  for (const chunk of scene.plan.chunks) {
    const left = at(chunk.playMs / 1000), right = at(chunk.playMs / 1000 + chunk.stopS - chunk.startS);
    const arrived = at(chunk.arrivalMs / 1000);
    if (Math.max(right, arrived) < 0 || Math.min(left, arrived) > width) continue;
    const chosen = chunk.index === scene.chunk, late = chunk.slackMs !== null && chunk.slackMs < 0;
    pen.fillStyle = chosen ? paint("orange") : scene.color;
    pen.globalAlpha = chosen ? 1 : 0.45;
    pen.beginPath();
    pen.roundRect(left + 0.75, STRIP.top, Math.max(1, right - left - 1.5), STRIP.bottom - STRIP.top, 3);
    pen.fill();
    pen.globalAlpha = 1;
    if (chosen) {
      pen.strokeStyle = paint("ink");
      pen.lineWidth = 1.5;
      pen.stroke();
    }
    if (!scene.timed) continue;
    pen.strokeStyle = pen.fillStyle = late ? paint("vermilion") : paint("orange");
    pen.lineWidth = chosen ? 2 : 1;
    pen.globalAlpha = chosen ? 1 : 0.7;
    pen.beginPath();
    pen.moveTo(left + 1, STRIP.bottom + 1);
    pen.bezierCurveTo(left + 1, ARRIVALS.bottom - 16, arrived, ARRIVALS.top + 12, arrived, ARRIVALS.bottom - 6);
    pen.stroke();
    pen.globalAlpha = 1;
    pen.beginPath();
    pen.moveTo(arrived, ARRIVALS.bottom - 8);
    pen.lineTo(arrived - 4.5, ARRIVALS.bottom);
    pen.lineTo(arrived + 4.5, ARRIVALS.bottom);
    pen.fill();
  }
  if (scene.timed) title(pen, paint, "arrivals", ARRIVALS.top + 22);
}

function drawBuffer({ pen, paint, at, width, scene }) {
  const { timesMs, levelS } = scene.plan.buffer, most = Math.max(...levelS, 1e-9);
  if (!timesMs.length) return;
  const y = (level) => BUFFER.bottom - (level / most) * (BUFFER.bottom - BUFFER.top);
  pen.beginPath();
  pen.moveTo(at(timesMs[0] / 1000), y(0));
  timesMs.forEach((time, i) => pen.lineTo(at(time / 1000), y(levelS[i])));
  pen.globalAlpha = 0.22;
  pen.fillStyle = pen.strokeStyle = paint("blue");
  pen.fill();
  pen.globalAlpha = 1;
  pen.lineWidth = 1.5;
  pen.stroke();
  title(pen, paint, `buffer, up to ${most.toPrecision(2)} s`, BUFFER.top + 6);
  pen.lineWidth = 1;
}

/** What a moment of the axis shows, in words. */
export function readout(scene, seconds, position) {
  const parts = [`${seconds.toFixed(3)} s`];
  if (scene.plan && scene.timed) {
    parts[0] += " after the request";
    if (position !== null) parts.push(`${position.toFixed(3)} s into the speech`);
    parts.push(`${levelAt(scene.plan.buffer, 1000 * seconds).toFixed(2)} s in the buffer`);
  }
  return parts.join(" · ");
}

/** Words on a plate of paper, centred. */
function plate(pen, paint, words, x, y, role) {
  const half = pen.measureText(words).width / 2 + 5;
  pen.fillStyle = paint("paper");
  pen.fillRect(x - half, y - 9, 2 * half, 18);
  pen.fillStyle = paint(role);
  pen.fillText(words, x, y);
}

function title(pen, paint, words, y) {
  pen.textAlign = "left";
  pen.textBaseline = "alphabetic";
  pen.lineWidth = 3;
  pen.strokeStyle = paint("paper");
  pen.strokeText(words, PAD + 2, y);
  pen.fillStyle = paint("soft");
  pen.fillText(words, PAD + 2, y);
}

function line(pen, x0, y0, x1, y1) {
  pen.beginPath();
  pen.moveTo(x0, y0);
  pen.lineTo(x1, y1);
  pen.stroke();
}

function hatch(pen, x, y, width, height) {
  pen.save();
  pen.beginPath();
  pen.rect(x, y, width, height);
  pen.clip();
  for (let shift = -height; shift < width; shift += 7) line(pen, x + shift, y + height, x + shift + height, y);
  pen.restore();
}
