// The players' arithmetic with answers worked out by hand. Run by test_player_arithmetic.py, or: node --test <this file>
import assert from "node:assert/strict";
import { test } from "node:test";
import { advance, gapless, levelAt, pieces, positionOf, receive, schedule, wallOf } from "../../omni_lab/workbench/playout.js";
import { BLOCK, decibels, difference, fittingGain, outline, peaks, stretch } from "../../omni_lab/workbench/signal.js";

const close = (found, expected) => assert.ok(Math.abs(found - expected) < 1e-9, `expected ${expected}, found ${found}`);

// 0.1 s, 0.2 s and 0.3 s at 1000 Hz: the second is 50 ms late, the third 100 ms early.
const LATE = schedule([500, 650, 750], [100, 200, 300], 1000);

test("a late chunk is a silence, an early one waits in the buffer", () => {
  assert.deepEqual(LATE.underruns, [{ startMs: 600, stopMs: 650 }]);
  assert.deepEqual(LATE.chunks.map((chunk) => chunk.playMs), [500, 650, 850]);
  assert.deepEqual(LATE.chunks.map((chunk) => chunk.slackMs), [null, -50, 100]);
  assert.deepEqual(LATE.chunks.map((chunk) => chunk.sinceMs), [500, 150, 100]);
  assert.deepEqual(LATE.segments, [
    { wallS: 0.5, startS: 0, stopS: 0.1 },
    { wallS: 0.65, startS: 0.1, stopS: 0.6 },
  ]);
  close(LATE.durationS, 0.6);
  assert.deepEqual([LATE.startS, LATE.stopS], [0.5, 1.15]);
});

test("the buffer's level", () => {
  assert.deepEqual(LATE.buffer.timesMs, [500, 500, 600, 650, 650, 750, 750, 1150]);
  [0, 0.1, 0, 0, 0.2, 0.1, 0.4, 0].forEach((level, i) => close(LATE.buffer.levelS[i], level));
  close(levelAt(LATE.buffer, 550), 0.05);
  close(levelAt(LATE.buffer, 625), 0);
  close(levelAt(LATE.buffer, 950), 0.2);
  assert.equal(levelAt(LATE.buffer, 100), 0);
  assert.equal(levelAt(LATE.buffer, 9999), 0);
});

test("a chunk that arrives as the buffer runs dry is in time", () => {
  const { underruns, chunks, segments } = schedule([0, 100], [100, 100], 1000);
  assert.deepEqual(underruns, []);
  assert.equal(chunks[1].slackMs, 0);
  assert.equal(segments.length, 1);
});

test("no chunks, empty chunks, no arrival times", () => {
  const nothing = schedule([], [], 24000);
  assert.deepEqual(nothing, { chunks: [], underruns: [], buffer: { timesMs: [], levelS: [] }, segments: [], durationS: 0, startS: 0, stopS: 0 });
  assert.equal(wallOf([], 3), 0);
  assert.equal(positionOf([], 3), 0);
  assert.deepEqual(pieces([], 0, 1), []);
  assert.deepEqual(gapless(0), []);
  assert.deepEqual(schedule([10, 20], [0, 0], 24000).chunks, []);
  assert.deepEqual(schedule([10, 20, 30], [0, 50, 0], 1000).chunks.map(({ index, sinceMs }) => [index, sinceMs]), [[1, 20]]);
  const untimed = schedule([], [100, 100], 1000);
  assert.deepEqual(untimed.segments, [{ wallS: 0, startS: 0, stopS: 0.2 }]);
  assert.deepEqual(untimed.underruns, []);
});

test("chunks one by one, as a live player gets them", () => {
  const first = receive(null, 500, 0.1);
  assert.deepEqual(first, { nowMs: 500, levelS: 0.1, playMs: 500, slackMs: null });
  assert.deepEqual(receive(first, 650, 0.2), { nowMs: 650, levelS: 0.2, playMs: 650, slackMs: -50 });
  assert.equal(receive(first, 560, 0.2).playMs, 600);
});

test("position and wall time", () => {
  const { segments } = LATE;
  for (const [wall, position] of [[0, 0], [0.5, 0], [0.55, 0.05], [0.625, 0.1], [0.65, 0.1], [1.15, 0.6], [5, 0.6]]) close(positionOf(segments, wall), position);
  for (const [position, wall] of [[-1, 0.5], [0, 0.5], [0.05, 0.55], [0.1, 0.65], [0.35, 0.9], [0.6, 1.15], [9, 1.15]]) close(wallOf(segments, position), wall);
});

test("what is started, as received: after the wait, and after the silence", () => {
  const all = pieces(LATE.segments, 0, 2);
  assert.equal(all.length, 2);
  [[0.5, 0, 0.1], [0.65, 0.1, 0.5]].forEach(([delay, offset, duration], i) => {
    close(all[i].delayS, delay);
    close(all[i].offsetS, offset);
    close(all[i].durationS, duration);
  });
  const [late] = pieces(LATE.segments, 0.6, 0.75, 2);
  close(late.delayS, 0.025);
  close(late.offsetS, 0.1);
  close(late.durationS, 0.1);
  assert.deepEqual(pieces(LATE.segments, 0.61, 0.64), []);
  assert.deepEqual(pieces(gapless(2), 0.5, 1.5, 0.5), [{ delayS: 0, offsetS: 0.5, durationS: 1 }]);
});

test("speed and loop", () => {
  assert.deepEqual(advance(1, 2, 0.5, [0, 5], false), { atS: 2, ended: false, rounds: 0 });
  assert.deepEqual(advance(1, 2, 2, [0, 5], false), { atS: 5, ended: true, rounds: 0 });
  assert.deepEqual(advance(1, 2.5, 2, [0, 5], true), { atS: 1, ended: false, rounds: 1 });
  assert.deepEqual(advance(2, 4, 1, [1, 3], true), { atS: 2, ended: false, rounds: 2 });
  assert.deepEqual(advance(0, 3, 1, [2, 3], true), { atS: 2, ended: false, rounds: 1 });
  assert.deepEqual(advance(0, 1, 1, [0, 0], true), { atS: 0, ended: true, rounds: 0 });
});

test("the outline keeps every peak, drawn wide or narrow", () => {
  const samples = new Float32Array(10 * BLOCK);
  samples[1000] = 0.75;
  samples[1700] = -0.5;
  const blocks = peaks(samples);
  assert.equal(blocks.high[Math.floor(1000 / BLOCK)], 0.75);
  for (const columns of [2, 5, 100, samples.length]) {
    const { low, high } = outline(samples, blocks, 0, samples.length, columns);
    assert.equal(Math.max(...high), 0.75);
    assert.equal(Math.min(...low), -0.5);
    assert.equal(high.length, columns);
  }
  assert.deepEqual([...outline(samples, blocks, 999, 1002, 3).high], [0, 0.75, 0]);
  assert.deepEqual([...outline(new Float32Array(0), peaks(new Float32Array(0)), 0, 0, 2).high], [0, 0]);
});

test("the difference of two takes", () => {
  const a = Float32Array.of(0.5, 0.25, 0, 0.125), b = Float32Array.of(0.5, 0.5, 0);
  const into = new Float32Array(4);
  assert.deepEqual(difference(a, b, into), { differing: 2, peak: 0.25, peakAt: 1 });
  assert.deepEqual([...into], [0, 0.25, 0, -0.125]);
  assert.deepEqual(difference(a, a, into), { differing: 0, peak: 0, peakAt: 0 });
  close(decibels(0.1), -20);
  assert.equal(fittingGain(0.25), 6);
  assert.equal(fittingGain(1), 0);
  assert.equal(fittingGain(0), 0);
});

test("another speed keeps the pitch, speed 1 keeps the samples", () => {
  const rate = 24000, sine = Float32Array.from({ length: rate }, (_, i) => 0.5 * Math.sin((2 * Math.PI * 440 * i) / rate));
  const crossings = (samples) => samples.reduce((count, value, i) => count + (i && samples[i - 1] < 0 && value >= 0 ? 1 : 0), 0);
  assert.deepEqual([...stretch(sine, rate, 1)].map(Math.fround), [...sine]);
  for (const speed of [0.5, 0.75, 1.25, 2]) {
    const made = stretch(sine, rate, speed);
    assert.equal(made.length, Math.round(rate / speed));
    const perSecond = crossings(made) / (made.length / rate);
    assert.ok(Math.abs(perSecond - 440) < 6, `at ${speed}: ${perSecond} Hz`);
    assert.ok(Math.max(...made.subarray(rate / 10, made.length - rate / 10)) > 0.45);
  }
  assert.equal(stretch(new Float32Array(0), rate, 2).length, 0);
});
