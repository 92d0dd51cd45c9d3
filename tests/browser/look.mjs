// node look.mjs PAGE.html FOLDER 360-dark ...: opens the page in Chromium at each of these widths and colour schemes, and
// prints one JSON object of what it saw. Screenshots land in FOLDER.
import chromium from "@sparticuz/chromium";
import fs from "node:fs";
import path from "node:path";
import puppeteer from "puppeteer-core";
import { pathToFileURL } from "node:url";

const [page_file, folder, ...wanted] = process.argv.slice(2);
const name = path.basename(page_file, ".html");
fs.mkdirSync(folder, { recursive: true });

const browser = await open();
const views = [];
try {
  for (const view of wanted) {
    const [width, scheme] = view.split("-");
    views.push(await look(Number(width), scheme));
  }
} finally {
  await browser.close();
}
console.log(JSON.stringify({ browser: "chromium", views }));

// The browser of RINGSTEP_BROWSER, else the one inside the npm package, else one that is installed; 77 where none starts.
async function open() {
  const places = [process.env.RINGSTEP_BROWSER].filter(Boolean);
  if (!places.length) {
    places.push(await chromium.executablePath().catch((error) => `npm's chromium: ${error.message}`));
    places.push(...["google-chrome", "chromium", "chromium-browser"].map((name) => `/usr/bin/${name}`).filter(fs.existsSync));
  }
  const failures = [];
  for (const executablePath of places) {
    try {
      return await puppeteer.launch({
        executablePath, headless: "shell",
        args: ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--font-render-hinting=none"],
      });
    } catch (error) {
      failures.push(`${executablePath}: ${String(error.message).split("\n")[0]}`);
    }
  }
  console.error(`no browser starts: ${failures.join("; ")}`);
  process.exit(77);
}

async function look(width, scheme) {
  const page = await browser.newPage();
  const seen = { width, scheme, errors: [], requests: [] };
  page.on("console", (message) => {
    if (["error", "warn", "warning"].includes(message.type())) seen.errors.push(message.text());
  });
  page.on("pageerror", (error) => seen.errors.push(String(error)));
  page.on("request", (request) => {
    if (!request.url().startsWith("data:")) seen.requests.push(request.url());
  });
  await page.setViewport({ width, height: width < 600 ? 780 : 900, isMobile: width < 600, hasTouch: width < 600 });
  await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
  await page.goto(pathToFileURL(path.resolve(page_file)).href, { waitUntil: "load" });
  // Charts are drawn as they come near: go to each in turn, and say which never was.
  for (const plot of await page.$$(".plot")) {
    await plot.evaluate((e) => e.scrollIntoView({ block: "center" }));
    await page.waitForFunction((e) => e.dataset.drawn === "done", { timeout: 30000 }, plot)
      .catch(async () => seen.errors.push(`not drawn: ${await plot.evaluate((e) => `${e.id} ${e.dataset.drawn}`)}`));
  }
  await new Promise((done) => setTimeout(done, 300));
  Object.assign(seen, await page.evaluate(measure));
  await page.evaluate(() => scrollTo(0, 0));
  await new Promise((done) => setTimeout(done, 400));
  seen.screenshot = path.join(folder, `${name}-${width}-${scheme}.png`);
  await page.screenshot({ path: seen.screenshot, fullPage: true });
  seen.sorted = await page.evaluate(sortEveryTable);
  if (seen.plots.length) seen.hover = await hover(page);
  // What the scheme's change does to charts that are drawn already.
  const before = await page.evaluate(pixels);
  await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme === "dark" ? "light" : "dark" }]);
  await new Promise((done) => setTimeout(done, 400));
  seen.recoloured = !before.length || JSON.stringify(before) !== JSON.stringify(await page.evaluate(pixels));
  await page.close();
  return seen;
}

// In the page: what stands where.
function measure() {
  const canvases = (root) => [...root.querySelectorAll("*")].flatMap((e) =>
    [...(e.tagName === "CANVAS" ? [e] : []), ...(e.shadowRoot ? canvases(e.shadowRoot) : [])]);
  const inked = (canvas) => {
    if (!canvas.width || !canvas.height) return 0;
    // Read from a copy: Chromium warns of a page that reads its own canvases often.
    const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
    copy.drawImage(canvas, 0, 0);
    const data = copy.getImageData(0, 0, canvas.width, canvas.height).data;
    let count = 0;
    for (let at = 3; at < data.length; at += 4) count += data[at] > 0;
    return count;
  };
  return {
    scripts: [...document.scripts].filter((s) => s.type !== "application/json").length,
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    background: getComputedStyle(document.body).backgroundColor,
    tables: document.querySelectorAll("table").length,
    plots: [...document.querySelectorAll(".plot")].map((plot) => ({
      width: plot.getBoundingClientRect().width, height: plot.getBoundingClientRect().height,
      inked: Math.max(0, ...canvases(plot).map(inked)),
    })),
    owned: window.owned === undefined ? null : String(window.owned),
    images: document.querySelectorAll("img, iframe, object, embed, base, link[href^=http]").length,
  };
}

// In the page: a click on each column of each table must order it, a second one the other way round.
function sortEveryTable() {
  const wrong = [];
  let clicks = 0;
  for (const table of document.querySelectorAll("table")) {
    const fold = table.closest("details");
    if (fold) fold.open = true;
    [...table.tHead.rows[0].cells].forEach((header, column) => {
      const read = () => [...table.tBodies[0].rows].map((row) => row.cells[column].dataset.sort);
      const before = [...read()].sort().join("|");
      for (let click = 0; click < 2; click++) {
        header.querySelector("button").click();
        clicks++;
        const way = header.getAttribute("aria-sort");
        const cells = read();
        const numeric = header.classList.contains("number");
        const value = (raw) => (raw === "-inf" ? -Infinity : Number(raw));
        for (let i = 1; i < cells.length; i++) {
          const order = numeric ? Math.sign(value(cells[i - 1]) - value(cells[i]) || 0)
            : cells[i - 1].localeCompare(cells[i], "en", { numeric: true });
          if (way === "ascending" ? order > 0 : way === "descending" ? order < 0 : true) {
            wrong.push(`${header.textContent} ${way}: ${cells[i - 1]}, ${cells[i]}`);
            break;
          }
        }
        if ([...cells].sort().join("|") !== before) wrong.push(`${header.textContent}: rows were lost`);
      }
    });
    for (const header of table.tHead.rows[0].cells) header.setAttribute("aria-sort", "none");
    if (fold) fold.open = false;
  }
  return { clicks, wrong };
}

// In the page: each chart's picture.
function pixels() {
  const canvases = (root) => [...root.querySelectorAll("*")].flatMap((e) =>
    [...(e.tagName === "CANVAS" ? [e] : []), ...(e.shadowRoot ? canvases(e.shadowRoot) : [])]);
  return [...document.querySelectorAll(".plot")].flatMap((p) => canvases(p).slice(0, 1)).map((c) => c.toDataURL());
}

// A pointer in the middle of the first chart: what the box beside it says.
async function hover(page) {
  const plot = await page.$(".plot");
  await plot.evaluate((e) => e.scrollIntoView({ block: "center" }));
  await new Promise((done) => setTimeout(done, 200));
  const box = await plot.boundingBox();
  await page.mouse.move(box.x + box.width * 0.5, box.y + box.height * 0.5);
  await page.mouse.move(box.x + box.width * 0.55, box.y + box.height * 0.5);
  await new Promise((done) => setTimeout(done, 400));
  const said = await page.evaluate(() => {
    const all = (root) => [...root.querySelectorAll("*")].flatMap((e) => [e, ...(e.shadowRoot ? all(e.shadowRoot) : [])]);
    return all(document).filter((e) => e.classList.contains("bk-tooltip-row-value") || e.classList.contains("bk-tooltip-content"))
      .map((e) => e.textContent).join(" ");
  });
  await page.mouse.move(1, 1);
  return said;
}
