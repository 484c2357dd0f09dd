// Labels and comments on answers, and links to them.
import { html, useState, useEffect } from "./vendor/preact.js";
import { useData, post, link, embedded } from "./lib.js";
import { copy, toast, Failure } from "./widgets.js";

export function LabelBox({ run, kind, address, version }) {
  const [label, setLabel] = useState("");
  const [comment, setComment] = useState("");
  const [sent, setSent] = useState(0);
  const labels = useData("labels", { run, kind }, `${version} ${sent}`);
  useEffect(() => {
    setLabel("");
    setComment("");
  }, [JSON.stringify(address)]);
  const all = labels.data || { labels: [], names: [] };
  const here = all.labels.filter((entry) => ["step", "uid", "index", "part"].every((name) => entry[name] === address[name]));
  const save = async (text) => {
    if (!text && !comment) return;
    try {
      await post("label", { run, kind, ...address, label: text, comment });
      setLabel("");
      setComment("");
      setSent((count) => count + 1);
      toast("Saved to labels.jsonl");
    } catch (error) {
      toast(error.message);
    }
  };
  const permanent = `${window.location.href.split("#")[0]}${link(run, "tokens", [address.step, address.uid, address.index, address.part], { kind })}`;
  return html`<section class="stack" style=${{ marginTop: "18px" }} aria-label="labels"><div class="row"><h2 class="grow">Labels</h2><button class="button quiet small" onClick=${() => copy(permanent, "Link copied")}>copy link</button></div>
    ${here.map((entry, place) => html`<div key=${place} class="stack" style=${{ gap: "2px" }}>${entry.label && html`<span><span class="chip accent">${entry.label}</span> <span class="faint">${entry.at.slice(0, 16).replace("T", " ")}</span></span>`}${entry.comment && html`<span>${entry.comment}</span>`}</div>`)}
    ${!embedded && html`<div class="row wrap" style=${{ gap: "4px" }}>${all.names.slice(0, 8).map((name) => html`<button key=${name} class="button small" onClick=${() => save(name)}>${name}</button>`)}</div>
    <input class="input" aria-label="label" placeholder="label" value=${label} onInput=${(event) => setLabel(event.target.value)} onKeyDown=${(event) => event.key === "Enter" && save(label)} />
    <textarea class="input" aria-label="comment" placeholder="comment" value=${comment} onInput=${(event) => setComment(event.target.value)}></textarea>
    <button class="button" disabled=${!label && !comment} onClick=${() => save(label)}>save</button>`}
    ${labels.error && html`<${Failure} error=${labels.error} />`}</section>`;
}
