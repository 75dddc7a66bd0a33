"use strict";
(() => {
  const all = (what, where = document) => [...where.querySelectorAll(what)];
  const one = (what, where = document) => where.querySelector(what);

  // Numbers on hover, tap and focus: one tip for everything that has data-tip.
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  tip.setAttribute("aria-hidden", "true");
  document.body.append(tip);
  const show = (element) => {
    const place = element.getBoundingClientRect();
    tip.textContent = element.dataset.tip;
    tip.hidden = false;
    const wide = tip.offsetWidth, high = tip.offsetHeight;
    const middle = place.left + Math.min(place.width, innerWidth) / 2 - wide / 2;
    tip.style.left = Math.max(6, Math.min(middle, document.documentElement.clientWidth - wide - 6)) + "px";
    tip.style.top = (place.top > high + 10 ? place.top - high - 6 : place.bottom + 6) + "px";
  };
  const hide = () => { tip.hidden = true; };
  const tipped = (event) => event.target.closest && event.target.closest("[data-tip]");
  for (const kind of ["pointerover", "focusin", "click"]) {
    document.addEventListener(kind, (event) => { const found = tipped(event); if (found) show(found); else hide(); });
  }
  addEventListener("scroll", hide, { passive: true });
  addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });

  // One protocol at a time.
  const choose = (name) => {
    for (const part of all("[data-protocol]")) part.hidden = part.dataset.protocol !== name;
    for (const button of all("[data-choose]")) button.setAttribute("aria-pressed", String(button.dataset.choose === name));
  };
  for (const button of all("[data-choose]")) button.addEventListener("click", () => choose(button.dataset.choose));
  if (one("[data-choose]")) choose(one("[data-choose]").dataset.choose);

  // The gallery: one case at a time, by buttons and arrow keys, filtered by attack and class.
  const cases = all(".case");
  if (cases.length) {
    const attack = one("#attack"), group = one("#class"), said = one("#place"), every = one("#every");
    const back = one("#back"), next = one("#next");
    let at = 0;
    const fitting = () => cases.filter((c) =>
      (!attack.value || c.dataset.attack === attack.value) && (!group.value || c.dataset.class === group.value.slice(1)));
    const update = () => {
      const open = fitting(), whole = every.getAttribute("aria-pressed") === "true";
      at = Math.max(0, Math.min(at, open.length - 1));
      for (const c of cases) {
        const fits = open.includes(c);
        c.classList.toggle("away", fits && !whole && c !== open[at]);  // printing shows them
        c.hidden = !fits || (!whole && c !== open[at]);
      }
      said.textContent = !open.length ? "none fits" : whole ? `${open.length} cases` : `${at + 1} of ${open.length}`;
      back.disabled = whole ? false : at === 0;
      next.disabled = whole ? false : at >= open.length - 1;
    };
    const move = (by) => {
      at += by;
      update();
      const open = fitting();
      if (every.getAttribute("aria-pressed") === "true" && open[at]) open[at].scrollIntoView({ block: "center" });
    };
    for (const filter of [attack, group]) filter.addEventListener("change", () => { at = 0; update(); });
    every.addEventListener("click", () => {
      every.setAttribute("aria-pressed", String(every.getAttribute("aria-pressed") !== "true"));
      update();
    });
    back.addEventListener("click", () => move(-1));
    next.addEventListener("click", () => move(1));
    addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by || event.altKey || event.ctrlKey || event.metaKey || /^(SELECT|INPUT|TEXTAREA)$/.test(event.target.tagName)) return;
      event.preventDefault();
      move(by);
    });
    update();
  }

  // Tables: a click on a head sorts; differences from the reference beyond both intervals are marked.
  for (const table of all("table.sortable")) {
    const body = one("tbody", table);
    all("thead th", table).forEach((head, column) => {
      const button = one("button", head);
      if (!button) return;
      button.addEventListener("click", () => {
        const falls = head.getAttribute("aria-sort") !== "descending" && !head.classList.contains("word")
          || head.getAttribute("aria-sort") === "ascending";
        for (const other of all("thead th", table)) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", falls ? "descending" : "ascending");
        const value = (row) => row.cells[column].dataset.value;
        const rows = all("tr", body);
        rows.sort((a, b) => {
          const x = value(a), y = value(b);
          if (x === "" || y === "") return (x === "") - (y === "");  // missing values last
          const numbers = !isNaN(x) && !isNaN(y);
          const order = numbers ? Number(x) - Number(y) : x.localeCompare(y);
          return falls ? -order : order;
        });
        body.append(...rows);
      });
    });
    const mark = (chosen) => {
      for (const row of all("tr", body)) {
        row.classList.toggle("reference", row === chosen);
        [...row.cells].forEach((cell, column) => {
          const sign = one(".beyond", cell), other = chosen.cells[column];
          if (!sign) return;
          const known = row !== chosen && cell.dataset.low && other.dataset.low;
          const up = known && Number(cell.dataset.low) > Number(other.dataset.high);
          const down = known && Number(cell.dataset.high) < Number(other.dataset.low);
          sign.textContent = up ? " ▲" : down ? " ▼" : "";
          sign.classList.toggle("up", Boolean(up));
          sign.classList.toggle("down", Boolean(down));
          if (up || down) sign.setAttribute("aria-label", up ? "higher beyond the intervals" : "lower beyond the intervals");
          else sign.removeAttribute("aria-label");
        });
      }
    };
    const chosen = () => one("input[type=radio]:checked", body);
    body.addEventListener("change", () => mark(chosen().closest("tr")));
    if (chosen()) mark(chosen().closest("tr"));
  }
})();
