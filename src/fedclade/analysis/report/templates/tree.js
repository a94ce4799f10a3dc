// The dendrogram. If it has too many branches, each of the lowest is drawn as one leaf.

function drawTree(run, tree) {
  if (!show("tree", Boolean(tree))) return;
  const top = Math.max(...tree.links.map((link) => link[3]));
  const last = tree.leaves.length - 1;
  const label = `${tree.label}${cutNote(tree)}`;
  const x = { label: tree.names ? "" : tree.x.label, domain: [-0.5, last + 0.5], ticks: false };
  const y = { label: tree.y.label, domain: [0, top * 1.05 || 1] };
  plot(
    "tree",
    { label, x, y, height: 340, bottom: tree.names ? 24 + 6.6 * Math.min(20, Math.max(...tree.names.map((name) => name.length))) : undefined, onpick: ({ group }) => change({ group: chosen.group === group || group < 0 ? null : group }) },
    (frame) => {
      for (const [left, right, leftFoot, height, rightFoot, group] of tree.links) {
        const path = `M${frame.x(left).toFixed(1)},${frame.y(leftFoot).toFixed(1)}V${frame.y(height).toFixed(1)}H${frame.x(right).toFixed(1)}V${frame.y(rightFoot).toFixed(1)}`;
        frame.body.append(draw("path", { class: `trace ${colorOf(colorFor(run, group))}${isDim(group) ? " dim" : ""}`, d: path, "data-group": group }));
      }
      if (tree.cut !== null) cut(frame, tree);
      return tree.leaves.map((entry, at) => leaf(frame, run, tree, entry, at, last > 60 ? 3 : 4));
    },
  );
  const caption = byId("tree").querySelector("figcaption");
  caption.textContent = `${label}.${tree.leaves.some(([, size]) => size > 1) ? " A leaf may represent several clients." : ""}`;
  groupLegend("tree", run, tree.leaves.map(([group]) => group));
  tableOfTree(tree);
}

// The report computes the tree from the features; the groups come from the method. The note shows whether they agree.
function cutNote({ cut: height, groups, agreement }) {
  if (height === null) return "";
  const same =
    agreement === 1
      ? "the cut gives exactly the groups of the run"
      : `its groups agree with the run's by ${number(agreement, 2)} (adjusted Rand index)`;
  return `, cut into ${number(groups)}; ${same}`;
}

function cut(frame, tree) {
  const y = frame.y(tree.cut);
  frame.body.append(draw("line", { class: "rule", id: "tree-cut", x1: frame.area.left, x2: frame.area.right, y1: y, y2: y }));
  frame.body.append(
    draw("text", { class: "strong", x: frame.area.right - 4, y: y - 6, "text-anchor": "end" }, `cut: ${number(tree.groups)} groups`),
  );
}

function leaf(frame, run, tree, [group, size], at, r) {
  const [x, y] = [frame.x(at), frame.area.bottom];
  const color = colorFor(run, group);
  frame.body.append(draw("path", { class: `mark ${colorOf(color)}${isDim(group) ? " dim" : ""}`, d: shapePath(color, x, y, r) }));
  const name = tree.names?.[at];
  if (name) frame.root.append(draw("text", { class: "row", "text-anchor": "end", transform: `translate(${x + 4},${y + 10}) rotate(-90)` }, shortened(name, 160)));
  return { x, y, group, text: `${name ?? `${number(size)} client${size > 1 ? "s" : ""}`}, ${groupName(group)}` };
}

function tableOfTree({ links }) {
  const upper = [...links]
    .sort((a, b) => b[3] - a[3])
    .slice(0, 20)
    .map((link, at) => ({ merge: at + 1, height: link[3], group: link[5] }));
  const columns = [
    { label: "Merge from the top", value: (row) => row.merge, numeric: true },
    { label: "Height", value: (row) => row.height, numeric: true },
    { label: "Group of the clients below", value: (row) => groupName(row.group) },
  ];
  table("tree-table", { caption: "The highest merges", columns, rows: upper, sortable: false });
}
