for (const figure of document.querySelectorAll("figure")) {
  const svg = figure.querySelector("svg"), cursor = svg.querySelector(".cursor"), output = figure.querySelector("output");
  const chart = JSON.parse(figure.querySelector("script").textContent), last = output.textContent;
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) * WIDTH / box.width;
    const nearest = chart.x.reduce((best, place, i) => Math.abs(place - x) < Math.abs(chart.x[best] - x) ? i : best, 0);
    cursor.setAttribute("x1", chart.x[nearest]);
    cursor.setAttribute("x2", chart.x[nearest]);
    output.textContent = chart.text[nearest];
  });
  svg.addEventListener("pointerleave", () => {
    cursor.setAttribute("x1", -9);
    cursor.setAttribute("x2", -9);
    output.textContent = last;
  });
}
