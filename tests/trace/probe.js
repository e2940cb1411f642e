// Runs in the page once it is drawn, with a test's own lines below; what these return, and
// any error, is left in the document for the test to read.
const errors = [];
window.addEventListener("error", (event) => errors.push(event.message));
window.addEventListener("unhandledrejection", (event) => errors.push(String(event.reason)));
(async () => {
  while (!document.documentElement.dataset.drawn) await new Promise((done) => setTimeout(done, 10));
  const said = () => document.querySelector("#told").textContent;
  const over = (step, page) => {  // the mouse, over the middle of a cell
    const box = map.getBoundingClientRect();
    const x = (step + 0.5 - view.x0) / (view.x1 - view.x0), y = (page + 0.5 - view.y0) / (view.y1 - view.y0);
    const clientX = box.left + LEFT + x * (box.width - LEFT), clientY = box.top + y * (box.height - BOTTOM);
    map.dispatchEvent(new PointerEvent("pointermove", { clientX, clientY, bubbles: true }));
    return said();
  };
  const press = (key) => {
    document.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    return { ...view };
  };
  const colour = (step, page) => {
    const box = map.getBoundingClientRect(), context = map.getContext("2d");
    const across = (box.width - LEFT) / (view.x1 - view.x0), down = (box.height - BOTTOM) / (view.y1 - view.y0);
    const found = new Set();
    for (let i = 1; i < 12; i++) for (let j = 1; j < 12; j++) {
      const x = LEFT + (step - view.x0 + i / 12) * across, y = (page - view.y0 + 0.3 + j / 20) * down;
      found.add(context.getImageData(x, y, 1, 1).data.join());
    }
    return [...found].sort();
  };
  let result;
  try { result = await (async () => { CODE })(); } catch (error) { errors.push(String(error)); }
  const told = document.body.appendChild(document.createElement("pre"));
  told.id = "probe";
  told.textContent = JSON.stringify({ errors, result });
})();
