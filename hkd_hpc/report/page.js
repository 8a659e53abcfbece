"use strict";
// Figures are drawn when they come into sight, so that a long report opens at once.
const plots = JSON.parse(document.getElementById("plots").textContent);
const root = document.documentElement;
const system = matchMedia("(prefers-color-scheme: dark)");

function isDark() {
  return root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
}

function colour(name) {
  return getComputedStyle(root).getPropertyValue(name).trim();
}

// Colours that are lost on dark paper, a light blue that must stay apart from the other one, and the ends of intervals of
// bars. All other colours do on both.
const DARK = {
  "#0072B2": "#3D9DE0", "#56B4E9": "#A0D8FF", "#000000": "#FFFFFF", "#772200": "#F0E442", "#5522AA": "#9A45E0",
  "#444444": "#DDDDDD",
};

function onThisPaper(value) {
  if (Array.isArray(value)) return value;
  if (value && typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([key, part]) => [key, onThisPaper(part)]));
  }
  return (isDark() && DARK[value]) || value;
}

function draw(place) {
  const { data, layout } = plots[place.dataset.plot];
  const own = { ...onThisPaper(layout), font: { family: getComputedStyle(document.body).fontFamily, color: colour("--ink"), size: 13 } };
  Plotly.react(place, data.map(onThisPaper), own, { responsive: true, displaylogo: false });
  place.dataset.drawn = isDark() ? "dark" : "light";
}

function drawAll(places) {
  places.forEach(draw);
}

const places = [...document.querySelectorAll("[data-plot]")];
// As high as it will be once it is drawn: else a jump down the page would miss by all that grows on the way.
places.forEach((place) => { place.style.height = `${plots[place.dataset.plot].layout.height}px`; });
const inSight = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (isIntersecting && !target.dataset.drawn) draw(target);
  }
}, { rootMargin: "400px" });
places.forEach((place) => inSight.observe(place));
addEventListener("beforeprint", () => {
  document.querySelectorAll("details").forEach((details) => { details.open = true; });
  drawAll(places);
});

// ------------------------------------------------------------------------------------------ light and dark

const button = document.getElementById("theme");

function tellTheme() {
  button.setAttribute("aria-pressed", String(isDark()));
  drawAll(places.filter((place) => place.dataset.drawn));
}

button.addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  tellTheme();
});
system.addEventListener("change", tellTheme);
tellTheme();

// ------------------------------------------------------------------------------------------ copy

function copied(text) {
  if (navigator.clipboard && isSecureContext) return navigator.clipboard.writeText(text);
  const area = Object.assign(document.createElement("textarea"), { value: text }); // pages opened from a file
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done ? Promise.resolve() : Promise.reject(new Error("not allowed"));
}

document.addEventListener("click", async ({ target }) => {
  if (!target.matches("button.copy")) return;
  const said = document.getElementById("said");
  try {
    await copied(target.dataset.copy);
    said.textContent = `${target.textContent}: done.`;
  } catch {
    said.textContent = `${target.textContent}: the browser does not allow it.`;
  }
});

// ------------------------------------------------------------------------------------------ links into closed parts

function openAt(hash) {
  const found = hash.length > 1 && document.getElementById(decodeURIComponent(hash.slice(1)));
  if (!found) return;
  for (let part = found; part; part = part.parentElement) if (part.tagName === "DETAILS") part.open = true;
  const own = found.querySelector(":scope > details");
  if (own) own.open = true;
}

addEventListener("hashchange", () => openAt(location.hash));
document.addEventListener("click", ({ target }) => target.hash && openAt(target.hash));
openAt(location.hash);
