import { decibels } from "./signal.js";
import { button, element, factList, icon, milliseconds } from "./dom.js";

/**
 * What stands under the player's drawing: functions of the deck that give the children of a panel.
 * `set` writes traitlets, `pick` listens to a take.
 */

/** A row for each take: what it is, its facts in columns, and whether it is A or B of the comparisons. */
export function takeRows(deck, set, pick) {
  const several = deck.takes.length > 1;
  const facts = deck.takes.map(({ facts }, i) => ({ ...facts, speech: `${deck.plans[i].durationS.toFixed(2)} s` }));
  const terms = [...new Set(facts.flatMap((found) => Object.keys(found)))];
  const head = ["", ...terms, ...(several ? ["compare"] : [])];
  const pill = (take, index, which) => {
    const pressed = { class: "pill", "aria-pressed": deck.at(which) === index };
    const letter = which.toUpperCase();
    return button(`Take ${take.label} as ${letter}`, () => set({ [which]: index }), pressed, letter);
  };
  const rows = deck.takes.map((take, index) => {
    const heard = index === deck.at("current") && deck.mode !== "difference";
    const swatch = element("i", { class: "swatch" });
    swatch.style.background = take.color;
    const choice = { class: "name", role: "radio", "aria-checked": heard };
    const name = button(`Listen to ${take.label}`, () => pick(index), choice, swatch, take.label);
    const cells = terms.map((term) => element("span", {}, facts[index][term] ?? ""));
    const pills = element("span", { class: "pills" }, pill(take, index, "a"), pill(take, index, "b"));
    return element("div", { class: heard ? "take heard" : "take" }, name, ...cells, ...(several ? [pills] : []));
  });
  return [element("div", { class: "take" }, ...head.map((term) => element("small", {}, term))), ...rows];
}

/** What is known of one chunk. */
export function chunkFacts(deck, chunk) {
  const take = deck.takes[deck.index];
  const facts = [
    ["frames", take.chunk_frames[chunk.index] ?? "not recorded"],
    ["samples", chunk.samples.toLocaleString("en")],
    ["lasts", milliseconds(1000 * (chunk.stopS - chunk.startS))],
  ];
  if (take.arrivals_ms.length) {
    facts.push(
      ["arrived at", milliseconds(chunk.arrivalMs)],
      ["after the one before", milliseconds(chunk.sinceMs)],
      ["in the buffer for", milliseconds(chunk.playMs - chunk.arrivalMs)],
      deadline(chunk.slackMs),
    );
  }
  return [
    element("strong", {}, `chunk ${chunk.index + 1} of ${take.chunk_samples.length}`),
    factList(facts),
    button("Hear this chunk alone", () => deck.hear(chunk), {}, icon("play"), "hear it alone"),
  ];
}

function deadline(slackMs) {
  if (slackMs === null) return ["deadline", "none, it starts the speech"];
  return slackMs < 0 ? ["deadline missed by", milliseconds(-slackMs)] : ["before its deadline", milliseconds(slackMs)];
}

/** Where the samples of A and B differ, and by how much. */
export function differenceFacts(deck) {
  const { differing, peak, peakAt, samples, sampleRate, trouble } = deck.difference;
  const [a, b] = ["a", "b"].map((which) => deck.takes[deck.at(which)].label);
  const count = (number) => number.toLocaleString("en");
  const where = `${count(differing)} of ${count(samples.length)} samples differ, by at most`;
  const step = peak * 32768 === 1 ? "one step of 16 bits, " : "";
  const most = `${step}${decibels(peak).toFixed(1)} dB of full scale, at ${(peakAt / sampleRate).toFixed(3)} s`;
  const found = trouble || (differing ? `${where} ${most}` : "identical: no sample differs");
  return [element("span", {}, `B − A: ${b} minus ${a}`), element("strong", {}, found)];
}

/** The blind test: what to listen to, what X is, and what the answers so far say. `last`: of the last trial. */
export function trialControls(deck, { heard, score, last }, set, answer) {
  const [a, b] = ["a", "b"].map((which) => deck.takes[deck.at(which)].label);
  const listen = ["a", "b", "x"].map((which) => {
    const pressed = { class: "pill", "aria-pressed": heard === which };
    const letter = which.toUpperCase();
    return button(`Listen to ${letter} (${which})`, () => set({ heard: which }), pressed, letter);
  });
  const answers = ["a", "b"].map((which) => button(`X is ${which.toUpperCase()}`, () => answer(which)));
  const { correct, trials, p_value: p, verdict } = score;
  const chance = p < 0.001 ? p.toExponential(1) : p.toFixed(3);
  const total = trials ? `${correct} of ${trials} right, p = ${chance}: ${verdict}` : verdict;
  return [
    element("span", {}, `A: ${a}, B: ${b}`),
    element("span", { class: "pills" }, "listen", ...listen),
    element("span", { class: "pills" }, "answer", ...answers),
    element("strong", {}, [last, total].filter(Boolean).join(" · ")),
    ...(trials ? [button("Start again", () => set({ trials: [] }))] : []),
  ];
}
