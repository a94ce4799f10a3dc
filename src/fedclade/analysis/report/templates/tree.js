// The tree of merges. Where it has more branches than fit, the lowest are drawn as one leaf each.

function drawTree(run) {
  const tree = run.tree;
  if (!show("tree", Boolean(tree))) return;
  const top = Math.max(...tree.links.map((link) => link[3]));
  const last = tree.leaves.length - 1;
  const label = `Tree of merges of ${number(tree.leaves.reduce((sum, [, size]) => sum + size, 0))} clients, ${tree.linkage} linkage${cutNote(tree)}`;
  const x = { label: "Clients; neighbours are alike", domain: [-0.5, last + 0.5], ticks: false };
  const y = { label: "Height of the merge", domain: [0, top * 1.05 || 1] };
  plot(
    "tree",
    { label, x, y, height: 340, onpick: ({ group }) => change({ group: chosen.group === group || group < 0 ? null : group }) },
    (here) => {
      for (const [left, right, leftFoot, height, rightFoot, group] of tree.links) {
        const path = `M${here.x(left).toFixed(1)},${here.y(leftFoot).toFixed(1)}V${here.y(height).toFixed(1)}H${here.x(right).toFixed(1)}V${here.y(rightFoot).toFixed(1)}`;
        here.body.append(draw("path", { class: `trace ${colourOf(group)}${isDim(group) ? " dim" : ""}`, d: path, "data-group": group }));
      }
      if (tree.cut !== null) cut(here, tree);
      return tree.leaves.map((one, at) => leaf(here, one, at, last > 60 ? 3 : 4));
    },
  );
  const caption = byId("tree").querySelector("figcaption");
  caption.textContent = `${label}.${tree.leaves.some(([, size]) => size > 1) ? " A leaf may stand for several clients." : ""}`;
  legendOfTree(tree);
  tableOfTree(tree);
}

// The tree is ours, drawn from what the method compared; the groups are the method's. Where the two differ, say so.
function cutNote({ cut: height, groups, agreement }) {
  if (height === null) return "";
  const same =
    agreement === 1
      ? "the cut gives the very groups of the run"
      : `the cut's groups agree with the run's by ${number(agreement, 2)} (adjusted Rand index)`;
  return `, cut into ${number(groups)}; ${same}`;
}

function cut(here, tree) {
  const y = here.y(tree.cut);
  here.body.append(draw("line", { class: "rule", id: "tree-cut", x1: here.area.left, x2: here.area.right, y1: y, y2: y }));
  here.body.append(
    draw("text", { class: "strong", x: here.area.right - 4, y: y - 6, "text-anchor": "end" }, `cut: ${number(tree.groups)} groups`),
  );
}

function leaf(here, [group, size], at, r) {
  const [x, y] = [here.x(at), here.area.bottom];
  here.body.append(draw("path", { class: `mark ${colourOf(group)}${isDim(group) ? " dim" : ""}`, d: shapePath(group, x, y, r) }));
  return { x, y, group, text: `${number(size)} client${size > 1 ? "s" : ""}, ${groupName(group)}` };
}

function legendOfTree(tree) {
  const groups = [...new Set(tree.leaves.map(([group]) => group))].filter((group) => group >= 0).sort((a, b) => a - b);
  byId("tree-legend").replaceChildren(
    ...(groups.length <= 24 ? groups.map((group) => make("li", {}, key(group), groupButton(group, `tree-group-${group}`))) : []),
  );
}

function tableOfTree({ links }) {
  const upper = [...links]
    .sort((a, b) => b[3] - a[3])
    .slice(0, 20)
    .map((link, at) => ({ merge: at + 1, height: link[3], group: link[5] }));
  const columns = [
    { label: "Merge from the top", value: (row) => row.merge, numeric: true },
    { label: "Height", value: (row) => row.height, numeric: true },
    { label: "Clients below it are of", value: (row) => groupName(row.group) },
  ];
  table("tree-table", { caption: "The highest merges", columns, rows: upper, sortable: false });
}
