// What a client's program prints: a line of JSON for each thing it tried.
export const [URL_, MODEL] = process.argv.slice(2);

export async function attempt(name, work) {
  let problem = null;
  try {
    if (!(await work())) problem = "the answer was empty";
  } catch (error) {
    console.error(error);
    problem = `${error.name}: ${error.message}`.split("\n")[0].slice(0, 160);
  }
  console.log(JSON.stringify({ name, problem }));
}

export const SCHEMA = {
  type: "object",
  properties: { name: { type: "string", maxLength: 20 }, age: { type: "integer", minimum: 0, maximum: 99 } },
  required: ["name", "age"],
  additionalProperties: false,
};

export function isPerson(given) {
  return Object.keys(given).sort().join() === "age,name" && Number.isInteger(given.age) && given.age <= 99;
}
