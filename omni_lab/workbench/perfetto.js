// Perfetto in a frame. It answers PONG to PING once it listens; then it takes a trace by message.
// https://perfetto.dev/docs/visualization/deep-linking-to-perfetto-ui

const ORIGIN = "https://ui.perfetto.dev";
const ASK_MS = 200;
const PATIENCE_MS = 20_000;

const MISSING =
  "ui.perfetto.dev gave no answer: it needs the internet. The view above works without it, " +
  "and Perfetto can open the file itself when there is a connection.";

function render({ model, el }) {
  const note = document.createElement("p");
  note.setAttribute("role", "status");
  note.style.cssText = "margin:4px 0;opacity:0.8";
  note.textContent = "Loading ui.perfetto.dev from the internet. The trace stays in this browser.";

  const frame = document.createElement("iframe");
  frame.title = `Perfetto: ${model.get("title")}`;
  frame.src = `${ORIGIN}/#!/?mode=embedded`;
  frame.style.cssText = "width:100%;height:560px;border:1px solid var(--jp-border-color1, #8b949e)";
  el.append(note, frame);

  const ask = setInterval(() => frame.contentWindow?.postMessage("PING", ORIGIN), ASK_MS);
  const giveUp = setTimeout(() => end("unreachable", MISSING), PATIENCE_MS);

  function end(state, words) {
    clearInterval(ask);
    clearTimeout(giveUp);
    window.removeEventListener("message", answer);
    note.textContent = words;
    frame.hidden = state !== "shown";
    model.set("state", state);
    model.save_changes();
  }

  function answer({ data, source }) {
    if (source !== frame.contentWindow || data !== "PONG") return;
    const view = model.get("trace");
    const buffer = view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength);
    const title = model.get("title");
    frame.contentWindow.postMessage({ perfetto: { buffer, title, fileName: title } }, ORIGIN, [buffer]);
    end("shown", `${title}, in Perfetto. The trace stays in this browser.`);
  }

  window.addEventListener("message", answer);
  return () => {
    clearInterval(ask);
    clearTimeout(giveUp);
    window.removeEventListener("message", answer);
  };
}

export default { render };
