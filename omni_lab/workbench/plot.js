// A plotly figure by the page's one copy of plotly's module, which `Library` of plot.py brings.
//
// anywidget gives a widget two seconds to begin, and the module may need more on a slow machine: so this begins at
// once, and draws when the module is there, the figure has a place, and the page knows the whole figure.

const shared = (globalThis[Symbol.for("omni_lab plotly")] ??= Promise.withResolvers());

const isWhole = (model) =>
  model.get("_whole_at") === model.get("_last_trace_edit_id") + model.get("_last_layout_edit_id");

/** Changes that came before there was a view are lost, and after a reload the page has an old figure: ask for it. */
function whole(model) {
  if (isWhole(model)) return undefined;
  return new Promise((resolve) => {
    const look = () => {
      if (!isWhole(model)) return;
      model.off("change", look);
      resolve();
    };
    model.on("change", look);
    model.send({ whole: true });
  });
}

export default () => {
  let widget;
  let ready;
  return {
    initialize(context) {
      ready = shared.promise.then((create) => {
        widget = create();
        widget.initialize(context);
      });
    },

    render(context) {
      const { model, el } = context;
      let width = 0;
      let end = () => {};
      let gone = false;

      async function draw() {
        await ready;
        await whole(model);
        if (!gone) end = widget.render(context);
      }

      // plotly measures its place once, and then looks only when the window changes
      const place = new ResizeObserver(() => {
        if (!el.clientWidth || el.clientWidth === width) return;
        if (width) el._responsiveChartHandler?.();
        else draw();
        width = el.clientWidth;
      });
      place.observe(el);
      return () => {
        gone = true;
        place.disconnect();
        end();
      };
    },
  };
};
