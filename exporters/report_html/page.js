"use strict";
// Tables sort on a click of a column's name; charts are drawn when they come near the screen, in the page's colours.
(() => {
  const text = new Intl.Collator("en", { numeric: true });

  function sort(header) {
    const body = header.closest("table").tBodies[0];
    const column = header.cellIndex;
    const descending = header.getAttribute("aria-sort") === "ascending" ||
      (header.getAttribute("aria-sort") === "none" && header.classList.contains("number"));
    for (const other of header.parentNode.cells) other.setAttribute("aria-sort", "none");
    header.setAttribute("aria-sort", descending && header.getAttribute("aria-sort") !== "descending" ? "descending" : "ascending");
    const key = (row) => row.cells[column].dataset.sort;
    const value = (raw) => (raw === "-inf" ? -Infinity : Number(raw));
    const numeric = header.classList.contains("number");
    const rows = [...body.rows].sort((a, b) => {
      const order = numeric ? value(key(a)) - value(key(b)) || 0 : text.compare(key(a), key(b));
      return descending ? -order : order;
    });
    body.append(...rows);
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("th button");
    if (button) sort(button.parentNode);
  });

  const style = () => getComputedStyle(document.documentElement);
  const drawn = [];

  function colour(roots) {
    const from = style();
    const get = (name) => from.getPropertyValue("--" + name).trim();
    for (const root of roots) {
      for (const model of root.references()) {
        const set = (values) => {
          const own = {};
          for (const [name, value] of Object.entries(values)) if (name in model.properties) own[name] = value;
          model.setv(own);
        };
        const tag = (model.tags || [])[0];
        if (/^c\d+$/.test(tag)) {
          const c = get("c" + (Number(tag.slice(1)) % 8));
          set({ line_color: c, fill_color: c });
        } else if (tag === "mark") set({ line_color: get("bad") });
        else if (tag === "limit") set({ line_color: get("limit") });
        else if (/Axis$/.test(model.type)) {
          set({ major_label_text_color: get("axis"), axis_line_color: get("grid"), major_tick_line_color: get("grid") });
        } else if (model.type === "Grid") set({ grid_line_color: get("grid") });
      }
    }
  }

  async function draw(place) {
    const source = document.querySelector(`script[data-plot="${place.id}"]`);
    if (!source || place.dataset.drawn) return;
    place.dataset.drawn = "begun";
    const item = JSON.parse(source.textContent);
    item.target_id = null;
    const views = await Bokeh.embed.embed_item(item, place.id);
    const roots = views.roots ? views.roots.map((view) => view.model) : [...views].map((view) => view.model);
    drawn.push(...roots);
    colour(roots);
    place.dataset.drawn = "done";
  }

  const places = [...document.querySelectorAll(".plot")];
  const near = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      near.unobserve(entry.target);
      draw(entry.target);
    }
  }, { rootMargin: "600px" });
  for (const place of places) near.observe(place);
  addEventListener("beforeprint", () => places.forEach(draw));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => colour(drawn));
})();
