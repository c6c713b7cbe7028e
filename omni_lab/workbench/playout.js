/**
 * The time arithmetic of playing: pure functions over arrival times, for the widgets and for their tests.
 *
 * A listener's player starts at the first chunk, plays whenever it has audio, and waits, silent, when it has none.
 * Three clocks occur. Arrival: ms since the request was sent. Wall: seconds since the request was sent, the axis of
 * everything that is drawn. Position: seconds into the speech, which has no gaps. Without underruns wall and position
 * differ by a constant. `omni_lab.views.request.playback` is the same arithmetic in Python; a test compares them.
 *
 * @typedef {{startMs: number, stopMs: number}} Underrun a silence between two chunks, ms since the request was sent
 * @typedef {{nowMs: number, levelS: number}} Listener the moment of the last arrival, and the audio waiting after it
 * @typedef {{wallS: number, startS: number, stopS: number}} Segment positions startS..stopS, heard from wallS on
 * @typedef {Object} Chunk
 * @property {number} index place in the take's lists; chunks without samples are left out, so indices may skip
 * @property {number} samples
 * @property {number} startS first position
 * @property {number} stopS position after the last sample
 * @property {number} arrivalMs
 * @property {number} playMs when a listener begins to hear it
 * @property {number} sinceMs time since the chunk before arrived (since the request was sent, for the first)
 * @property {?number} slackMs how long before the buffer ran dry it came; negative: silent that long; null: the first
 */

/**
 * The listener after one more chunk.
 * @param {?Listener} listener null before the first chunk
 * @param {number} arrivalMs
 * @param {number} durationS audio in the chunk
 * @returns {Listener & {playMs: number, slackMs: ?number}} `playMs`: when the chunk begins to be heard
 */
export function receive(listener, arrivalMs, durationS) {
  if (listener === null) return { nowMs: arrivalMs, levelS: durationS, playMs: arrivalMs, slackMs: null };
  const emptyMs = listener.nowMs + 1000 * listener.levelS;
  const slackMs = emptyMs - arrivalMs;
  const left = emptyMs < arrivalMs ? 0 : listener.levelS - (arrivalMs - listener.nowMs) / 1000;
  return { nowMs: arrivalMs, levelS: left + durationS, playMs: Math.max(emptyMs, arrivalMs), slackMs };
}

/**
 * What a listener hears, and when.
 * @param {ArrayLike<number>} arrivalsMs when each chunk came; empty if nobody recorded it: then all is there at once
 * @param {ArrayLike<number>} chunkSamples samples of each chunk
 * @param {number} sampleRate
 * @returns {{chunks: Chunk[], underruns: Underrun[], buffer: {timesMs: number[], levelS: number[]},
 *   segments: Segment[], durationS: number, startS: number, stopS: number}} `buffer`: corners of the level's line;
 *   `segments`: stretches without silence; `startS`, `stopS`: wall time at which the speech begins and ends
 */
export function schedule(arrivalsMs, chunkSamples, sampleRate) {
  const chunks = [], underruns = [], segments = [], buffer = { timesMs: [], levelS: [] };
  let listener = null, samples = 0;
  for (let index = 0; index < chunkSamples.length; index++) {
    if (!(chunkSamples[index] > 0)) continue;
    const arrivalMs = arrivalsMs.length ? arrivalsMs[index] : 0;
    const durationS = chunkSamples[index] / sampleRate;
    const next = receive(listener, arrivalMs, durationS);
    const startS = samples / sampleRate;
    samples += chunkSamples[index];
    const stopS = samples / sampleRate;
    const late = next.slackMs !== null && next.slackMs < 0;
    if (late) {
      underruns.push({ startMs: arrivalMs + next.slackMs, stopMs: arrivalMs });
      buffer.timesMs.push(arrivalMs + next.slackMs);
      buffer.levelS.push(0);
    }
    buffer.timesMs.push(arrivalMs, arrivalMs);
    buffer.levelS.push(late || listener === null ? 0 : next.levelS - durationS, next.levelS);
    if (late || listener === null) segments.push({ wallS: next.playMs / 1000, startS, stopS });
    else segments[segments.length - 1].stopS = stopS;
    const sinceMs = arrivalMs - (listener === null ? 0 : listener.nowMs);
    chunks.push({
      index, samples: chunkSamples[index], startS, stopS, arrivalMs, sinceMs,
      playMs: next.playMs, slackMs: next.slackMs,
    });
    listener = next;
  }
  if (listener !== null) {
    buffer.timesMs.push(listener.nowMs + 1000 * listener.levelS);
    buffer.levelS.push(0);
  }
  const durationS = samples / sampleRate;
  const startS = segments.length ? segments[0].wallS : 0;
  return { chunks, underruns, buffer, segments, durationS, startS, stopS: wallOf(segments, durationS) };
}

/** The one segment of speech that plays without gaps from wall 0: there position and wall are the same. */
export function gapless(durationS) {
  return durationS > 0 ? [{ wallS: 0, startS: 0, stopS: durationS }] : [];
}

/**
 * Wall time at which a position is heard; at a silence, the moment after it. Positions outside go to the ends.
 * @param {Segment[]} segments
 * @param {number} positionS
 */
export function wallOf(segments, positionS) {
  if (!segments.length) return 0;
  const found = segments.find((segment) => positionS < segment.stopS) ?? segments[segments.length - 1];
  return found.wallS + Math.min(Math.max(positionS, found.startS), found.stopS) - found.startS;
}

/**
 * The position that is heard at a wall time; in a silence, and outside the speech, where it goes on or has stopped.
 * @param {Segment[]} segments
 * @param {number} wallS
 */
export function positionOf(segments, wallS) {
  let position = segments.length ? segments[0].startS : 0;
  for (const { wallS: begin, startS, stopS } of segments) {
    if (wallS < begin) break;
    position = Math.min(startS + wallS - begin, stopS);
  }
  return position;
}

/**
 * The pieces to start so that the wall times fromS..toS are heard once.
 * @param {Segment[]} segments
 * @param {number} fromS
 * @param {number} toS
 * @param {number} speed wall seconds that pass in a second of the room
 * @returns {{delayS: number, offsetS: number, durationS: number}[]} start `delayS` room seconds from now, at position
 *   `offsetS`, and play `durationS` of speech
 */
export function pieces(segments, fromS, toS, speed = 1) {
  const found = [];
  for (const { wallS, startS, stopS } of segments) {
    const begin = Math.max(wallS, fromS), end = Math.min(wallS + stopS - startS, toS);
    if (begin < end) {
      found.push({ delayS: (begin - fromS) / speed, offsetS: startS + begin - wallS, durationS: end - begin });
    }
  }
  return found;
}

/**
 * Where a clock stands that was at `fromS` and has run for `elapsedS` room seconds.
 * @param {number} fromS
 * @param {number} elapsedS
 * @param {number} speed
 * @param {[number, number]} span where playing begins again and where it ends
 * @param {boolean} loop at the end of the span, go on at its start; otherwise stop there
 * @returns {{atS: number, ended: boolean, rounds: number}} `rounds`: how often the start was gone back to
 */
export function advance(fromS, elapsedS, speed, [startS, stopS], loop) {
  const reachedS = fromS + elapsedS * speed;
  if (reachedS < stopS) return { atS: reachedS, ended: false, rounds: 0 };
  if (!loop || stopS <= startS) return { atS: stopS, ended: true, rounds: 0 };
  const over = reachedS - stopS, length = stopS - startS;
  return { atS: startS + (over % length), ended: false, rounds: 1 + Math.floor(over / length) };
}

/**
 * Seconds of audio that wait at a moment.
 * @param {{timesMs: number[], levelS: number[]}} buffer
 * @param {number} ms since the request was sent
 */
export function levelAt({ timesMs, levelS }, ms) {
  const after = timesMs.findIndex((time) => time > ms);
  if (after < 1) return 0;
  const span = timesMs[after] - timesMs[after - 1];
  return levelS[after - 1] + ((levelS[after] - levelS[after - 1]) * (ms - timesMs[after - 1])) / span;
}
